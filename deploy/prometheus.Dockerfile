# Prometheus out of Debian, for machines that reach no image registry; it stands in for prom/prometheus.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus >/dev/null \
    && rm -rf /var/lib/apt/lists/* && install -d -o nobody -g nogroup /prometheus
