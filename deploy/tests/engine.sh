#!/usr/bin/env bash
# engine.sh COMMAND...: run a command with a Docker engine: the one that runs, or else one of our own (needs root and
# dockerd), which is stopped at the end. Exit code 69 if there can be none, else the command's.
set -euo pipefail

UNAVAILABLE=69
START_S=60

if ! docker info >/dev/null 2>&1; then
    log=$(mktemp)
    dockerd >"$log" 2>&1 &
    engine=$!
    trap 'kill "$engine" 2>/dev/null; wait "$engine" || true; rm -f "$log"' EXIT
    for ((waited = 0; waited < START_S; waited++)); do
        if docker info >/dev/null 2>&1 || ! kill -0 "$engine" 2>/dev/null; then break; fi
        sleep 1
    done
    docker info >/dev/null 2>&1 || { tail -n 5 "$log" >&2; exit "$UNAVAILABLE"; }
fi
"$@"
