"""The cost of every kernel, as a table, without a GPU: `python -m lab.gpu.inspect`.

Compiles kernels for every architecture with Triton's own assembler and prints registers, spills, matrix instructions,
loads, and the instructions that a warp issues in the main loop. `machine_code.py` reads the machine code, `examples.py`
lists the kernels. Kernels that fail a gate are named at the end, with exit status 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TextIO

from lab.gpu.examples import EXAMPLES, GRID, NAMED
from lab.gpu.machine_code import ARCHITECTURES, Report, faults, fingerprint, generation, inspect

COLUMNS: Final = {
    "name": ("kernel", 44),
    "arch": ("sm", 5),
    "registers": ("regs", 6),
    "local_accesses": ("spills", 8),
    "loop": ("loop", 7),
    "loop_per_64_tokens": ("/64 tok", 9),
    "int8_mma": ("imma", 6),
    "float_mma": ("hmma", 6),
    "code_loads": ("codes", 7),
    "loads_128": ("ld128", 7),
    "async_128": ("async", 7),
    "loads_64": ("ld64", 6),
    "loads_narrower": ("ld<64", 7),
    "blocks": ("tma", 5),
    "barriers": ("bar", 5),
    "instructions": ("all", 7),
}
"""Field of a report -> title and width in the printed table."""

Pair = tuple[str, int]
"""A kernel's name and an architecture."""


def kept(results: Path, pairs: Sequence[Pair]) -> Iterator[Report]:
    """Reports of `pairs` that an earlier run wrote, if kernel, launch and Triton have not changed since."""
    if not results.exists():
        return
    wanted = set(pairs)
    for number, line in enumerate(results.read_text().splitlines(), 1):
        try:
            report = Report(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise SystemExit(f"{results}, line {number} is no report of this version ({error}): remove it") from error
        pair = report.name, report.arch
        if pair in wanted and report.fingerprint == fingerprint(NAMED[report.name].launch, report.arch):
            wanted.remove(pair)
            yield report


def read(pairs: Sequence[Pair], jobs: int) -> Iterator[tuple[list[Pair], list[Report] | str]]:
    """Compile and read kernels in `jobs` processes: threads would read machine code one after another. Yields, in the
    order of completion, the pairs of one kernel and generation, and their reports or the reason of a failure."""
    tasks = [list(task) for _, task in itertools.groupby(pairs, lambda pair: (pair[0], generation(pair[1])))]
    with ProcessPoolExecutor(jobs, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        futures = {pool.submit(_read_task, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read_task(task: list[Pair]) -> list[Report] | str:
    try:
        return inspect(NAMED[task[0][0]], [arch for _, arch in task])
    except Exception as error:  # noqa: BLE001 - Triton raises any type; the other kernels are still worth reading
        return f"{type(error).__name__}: {error}"


def _line(report: Report, *, as_json: bool) -> str:
    fields = asdict(report)
    if as_json:
        return json.dumps(fields, ensure_ascii=False)
    return "".join(f"{'-' if fields[key] is None else fields[key]:>{w}}" for key, (_, w) in COLUMNS.items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu.inspect", description=__doc__)
    parser.add_argument("--kernel", nargs="*", choices=sorted(NAMED), metavar="NAME")
    parser.add_argument("--grid", action="store_true", help="every kernel at every size and width; hours of one core")
    parser.add_argument("--arch", nargs="*", type=int, choices=ARCHITECTURES, default=ARCHITECTURES, metavar="SM")
    parser.add_argument("--list", action="store_true", help="print the names of the kernels and stop")
    parser.add_argument(
        "--fingerprints", action="store_true",
        help="print what stands for each kernel's machine code and stop; seconds a kernel, equal where that is equal",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel and architecture")
    parser.add_argument(
        "--results", type=Path, metavar="FILE",
        help="also append JSON lines to FILE as they come; what it holds already is not read again",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; one per core")
    return parser.parse_args()


def main() -> int:
    """Print the table, or JSON lines, and then the kernels that fail a gate."""
    options = _arguments()
    names = list(dict.fromkeys(options.kernel or [example.name for example in (GRID if options.grid else EXAMPLES)]))
    if options.list:
        print("\n".join(names))
        return 0
    pairs = [(name, arch) for name in names for arch in sorted(set(options.arch))]
    if options.fingerprints:
        for name, arch in pairs:
            print(f"{name} sm_{arch}: {fingerprint(NAMED[name].launch, arch)}", flush=True)
        return 0
    reports = list(kept(options.results, pairs)) if options.results else []
    if not options.json:
        print("".join(f"{title:>{width}}" for title, width in COLUMNS.values()))
    for report in reports:
        print(_line(report, as_json=options.json))
    with (options.results or Path(os.devnull)).open("a") as results:
        failures = _read_and_print(pairs, reports, results, options)
    failures += [f"{r.name} sm_{r.arch}: {', '.join(bad)}" for r in reports if (bad := faults(NAMED[r.name], r))]
    print(f"{len(reports)} of {len(pairs)} read, {len(failures)} fail", *failures, sep="\n  ", file=sys.stderr)
    return int(bool(failures) or len(reports) < len(pairs))


def _read_and_print(
    pairs: Sequence[Pair], reports: list[Report], results: TextIO, options: argparse.Namespace
) -> list[str]:
    """Append missing reports to `reports`. Returns the failures with their reasons; stops early at an interrupt."""
    have = {(report.name, report.arch) for report in reports}
    left = [pair for pair in pairs if pair not in have]
    failures, done, begin = [], 0, time.monotonic()
    try:
        for task, found in read(left, options.jobs):
            done += len(task)
            if isinstance(found, str):
                failures += [f"{name} sm_{arch}: {found}" for name, arch in task]
                continue
            reports += found
            for report in found:
                print(_line(report, as_json=options.json), flush=True)
                print(_line(report, as_json=True), file=results, flush=True)
            if sys.stderr.isatty():
                minutes = (time.monotonic() - begin) / done * (len(left) - done) / 60
                print(f"{len(reports)} of {len(pairs)}, {minutes:.0f} min left", end="\r", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return failures


if __name__ == "__main__":
    sys.exit(main())
