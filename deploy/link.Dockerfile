# The image of the link throttle (profile `throttle`): a Debian with `tc`.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN command -v tc >/dev/null || (apt-get update -qq \
    && apt-get install -qq -y --no-install-recommends iproute2 >/dev/null && rm -rf /var/lib/apt/lists/*)
COPY link.sh /usr/local/bin/link
CMD ["link"]
