#!/usr/bin/env bash
# The kernel tests under the address and undefined-behaviour sanitizers: kernels/csrc/sanitize.sh [pytest arguments].
# Needs an installed checkout (pip install -e .) and PYTHON pointing at its interpreter. The installed extension is
# swapped for the sanitized one and put back afterwards.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
build=build/sanitize

cmake -S kernels/csrc -B "$build" -DHACK_SANITIZE=ON -DPython_EXECUTABLE="$(realpath -s "$python")" > /dev/null
cmake --build "$build" --parallel

installed=$("$python" -c 'import importlib.util as u; print(u.find_spec("hack_kernels._cpu").origin)')
cp "$installed" "$build/installed.so"
trap 'cp "$build/installed.so" "$installed"' EXIT
cp "$build/$(basename "$installed")" "$installed"

# The interpreter is not sanitized: the runtimes are preloaded, and its own leaks are not ours to count.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
if [ $# -eq 0 ]; then set -- tests/hack_kernels/test_cpu.py tests/hack_kernels/test_rows.py tests/hack_kernels/test_rowwise.py tests/hack_kernels/test_rivals.py; fi
"$python" -m pytest -q -p no:cacheprovider "$@"
