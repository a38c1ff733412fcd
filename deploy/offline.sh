#!/usr/bin/env bash
# Makes what deploy/offline.yml builds on: the image hackkv-base:bookworm, from Debian's packages (debootstrap, as root),
# and the wheels of every Python dependency in deploy/wheels, as this machine's pip finds them. Both are made once.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=bookworm
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
PYTHON=${PYTHON:-python3}

make_base() {
    local root
    root=$(mktemp -d)
    trap 'rm -rf "$root"' RETURN
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$root" "$MIRROR" >"$root.log" \
        || { tail -5 "$root.log"; return 1; }
    rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
        "$root"/usr/share/{doc,man,locale}/*
    # Certificate authorities that this machine trusts beside Debian's own.
    cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null \
        && chroot "$root" update-ca-certificates >/dev/null
    tar -C "$root" -c . | docker import - "hackkv-base:$SUITE" >/dev/null
}

requirements() {
    "$PYTHON" -c '
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
print(re.search("ARG TORCH=(.*)", open("deploy/Dockerfile").read())[1], "cmake", "ninja", *project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")'
}

docker image inspect "hackkv-base:$SUITE" >/dev/null 2>&1 || { echo "making hackkv-base:$SUITE"; make_base; }
echo "collecting wheels"
"$PYTHON" -m pip download --quiet --only-binary :all: --python-version 3.11 --dest deploy/wheels --constraint constraints.txt \
    --requirement <(requirements)
