#!/usr/bin/env bash
# Which vector instructions share a unit with the integer products on this processor: lab/units.sh
set -euo pipefail
cd "$(dirname "$0")"
program=$(mktemp)
trap 'rm -f "$program"' EXIT
g++ -std=c++20 -O2 -mavx512f -mavx512bw -mavx512vnni -mgfni csrc/units.cpp -o "$program"
"$program"
