#!/usr/bin/env bash
# The portable kernels, compiled for this machine and for aarch64, must say the same to the bit. The aarch64 program runs
# under emulation. Needs g++, and from Debian g++-aarch64-linux-gnu and qemu-user. `agree.sh here` prints what this
# machine says, and needs g++ alone.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/agree
kernels=kernels/csrc
mkdir -p "$build"
sources="lab/csrc/agree.cpp $kernels/attention.cpp $kernels/thread_pool.cpp $kernels/unit_portable.cpp"
flags="-I $kernels -std=c++20 -O2 -Wall -Wextra -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread"
g++ $flags $sources -o "$build/here"
if [ "${1:-}" = here ]; then exec "$build/here"; fi
aarch64-linux-gnu-g++ -static $flags $sources -o "$build/aarch64"
"$build/here" > "$build/here.txt"
qemu-aarch64 "$build/aarch64" > "$build/aarch64.txt"
cmp "$build/here.txt" "$build/aarch64.txt"
if grep "LOST BITS" "$build/here.txt"; then exit 1; fi
echo "aarch64 agrees with $(uname -m): $(wc -l < "$build/here.txt") formats"
