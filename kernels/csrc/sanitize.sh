#!/usr/bin/env bash
# The kernel tests under the address and undefined-behaviour sanitizers: kernels/csrc/sanitize.sh [pytest arguments].
# SLICE=K/N runs one of N parts of them (tests/tiers.py).
# Needs an installed checkout (pip install -e .) and PYTHON pointing at its interpreter. The installed extensions
# are swapped for the sanitized ones and put back afterwards.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
build=build/sanitize

cmake -S kernels/csrc -B "$build" -DHACK_SANITIZE=ON -DHACK_LAB=ON -DPython_EXECUTABLE="$(realpath -s "$python")" > /dev/null
cmake --build "$build" --parallel "$(nproc)"

swapped=()
put_back() { for extension in "${swapped[@]}"; do mv "$extension.installed" "$extension"; done; }
trap put_back EXIT
for module in hack_kernels._cpu lab._rivals; do
  installed=$("$python" -c "import importlib.util as u; print(u.find_spec('$module').origin)")
  mv "$installed" "$installed.installed"
  swapped+=("$installed")
  cp "$(find "$build" -name "$(basename "$installed")")" "$installed"
done

# The interpreter is not sanitized: the runtimes are preloaded, and its own leaks are not ours to count.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
if [ $# -eq 0 ]; then set -- tests/hack_kernels/cpu tests/hack_kernels/test_{rows,rowwise,head_rotations,choosing,voting,page_selection,window,block_weight}.py tests/lab/test_rivals.py tests/test_rans_form.py; fi
"$python" -m pytest -q -p no:cacheprovider -n auto --dist loadfile ${SLICE:+--slice "$SLICE"} "$@"
