#!/usr/bin/env bash
# Which vector instructions share a unit with the integer products on this processor: lab/units.sh
set -euo pipefail
cd "$(dirname "$0")"
program=$(mktemp)
trap 'rm -f "$program"' EXIT
if grep -qw avx512_vnni /proc/cpuinfo; then
    g++ -std=c++20 -O2 -mavx512f -mavx512bw -mavx512vnni -mgfni csrc/units_avx512.cpp -o "$program"
else
    g++ -std=c++20 -O2 -mavx2 -mfma csrc/units_avx2.cpp -o "$program"
fi
"$program"
