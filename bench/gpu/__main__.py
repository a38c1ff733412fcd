"""Check every GPU kernel against the reference, then time them beside BF16 attention and dequantization.

One command, unattended: `PYTHONPATH=kernels python -m bench.gpu`. It needs torch, Triton, numpy and `hack_kernels` from
this checkout. Checks run side by side, in processes that compile meanwhile what is timed later; then rows are timed,
one at a time. Results are written as they come, as JSON and as a Markdown table, the most important first; when
`--budget` seconds are over, nothing more is begun, and what was left out is named. The exit status is 1 if a check
failed. `--smoke` runs the same logic on tiny shapes, for Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import torch
import triton
from hack_kernels import load
from hack_kernels.base import BackendUnavailable, HackFormat, Rounding
from hack_kernels.triton.backend import TritonKernels

from bench.gpu.checks import Check, checks, run_check
from bench.gpu.shapes import Row, decode_bytes, decode_row, prefill_row, seal_row
from bench.gpu.timing import copy_bandwidth

BUDGET_S = 420
"""Below 8 minutes with the start of Python and the row or check that is under way when it is over."""
CHECKS_SHARE = 0.4
"""Of the budget, at most: nearly all of a check is compiling its kernels, so processes share them out."""
CHECKS_PER_PROCESS = 4
"""A process in which a kernel broke the GPU's context must not fail many others."""
REHEARSED_TOKENS = 1024
"""Long enough for a kernel to be compiled as it is for the lengths that are timed: tables have rows of 16 pages."""
DECODES = (
    *((2**17, 1), (2**15, 8)),
    *((2**17, 8), (2**15, 1), (2**14, 1), (2**12, 1), (2**14, 8), (2**12, 8)),
    *((2**15, 32), (2**12, 32), (2**14, 32), (2**17, 32)),
)
"""Tokens and batch, those with a target of their own first."""
PREFILLS = (2**14, 2**15, 2**12, 2**13)

HEADER = "| what | shape | us | faster than BF16 | GB/s | target |\n|---|---|---|---|---|---|"


@dataclass(slots=True)
class Results:
    """What has been found so far; written to `folder` whenever it grows."""

    machine: dict[str, object]
    folder: Path
    checks_passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Both files, whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {name: getattr(self, name) for name in ("machine", "checks_passed", "failures", "skipped")}
        rows = [asdict(row) for row in self.rows]
        (self.folder / "gpu.json").write_text(json.dumps(content | {"rows": rows}, indent=1), encoding="utf-8")
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [about, "", f"{self.checks_passed} checks passed, {len(self.failures)} failed.", "", HEADER]
        left_out = [f"\nLeft out: {'; '.join(self.skipped)}."] if self.skipped else []
        (self.folder / "gpu.md").write_text("\n".join([*lines, *map(line, self.rows), *left_out, ""]), encoding="utf-8")


def line(row: Row) -> str:
    """A row of the Markdown table."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in row.us.items())
    ratio = "" if row.faster_than_bf16 is None else f"{row.faster_than_bf16:.2f}x"
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
    return f"| {row.what} | {row.shape} | {times} | {ratio} | {rate} | {row.target} |"


def rehearsals(*, smoke: bool) -> Iterator[Check]:
    """What is timed later, on short sequences: nobody looks at the times, but Triton keeps the compiled kernels."""
    for rounding in Rounding:
        fmt = HackFormat(128, 64, rounding=rounding)
        yield Check(f"seal {rounding}", partial(seal_row, 64 if smoke else REHEARSED_TOKENS, 1 if smoke else 8, fmt))
    if smoke:
        return
    yield Check("prefill", partial(prefill_row, REHEARSED_TOKENS, 8, 4))
    for batch in sorted({batch for _, batch in DECODES}):
        for group in (8, 4):
            yield Check(f"decode x {batch}, group {group}", partial(decode_row, REHEARSED_TOKENS, batch, 8, group))


def run_checks(results: Results, deadline: float, *, smoke: bool) -> None:
    """Rehearsals and checks in a pool of processes, until the deadline of `monotonic`."""
    waiting = {check.name for check in checks(smoke=smoke)}
    tasks = [*rehearsals(smoke=smoke), *checks(smoke=smoke)]
    processes = min(os.cpu_count() or 1, 2 if smoke else 16)
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=CHECKS_PER_PROCESS) as pool:
        answers = pool.imap_unordered(run_check, tasks)
        for _ in tasks:
            try:
                name, failure = answers.next(max(0.0, deadline - monotonic()))
            except multiprocessing.TimeoutError:
                break
            if failure:
                results.failures[name] = failure.strip().splitlines()[-1]
                print(f"FAILED {name}\n{failure}", file=sys.stderr, flush=True)
            results.checks_passed += name in waiting and not failure
            waiting.discard(name)
            results.write()
    results.skipped += [f"check {name}: out of time" for name in sorted(waiting)]


def measurements(kernels: TritonKernels, results: Results, *, smoke: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Name and function of every row that fits into memory."""
    kv_heads = 1 if smoke else 8
    groups = (4,) if smoke else (8, 4)

    def decode(tokens: int, batch: int) -> Iterator[tuple[str, Callable[[], Row]]]:
        for group in groups:
            name = f"decode {tokens} x {batch}, group {group}"
            if kernels.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(kernels.device)
                if decode_bytes(tokens, batch, kv_heads) > 0.8 * free:
                    results.skipped.append(f"{name}: does not fit memory")
                    continue
            yield name, partial(decode_row, tokens, batch, kv_heads, group, kernels)

    def prefill(tokens: int) -> tuple[str, Callable[[], Row]]:
        return f"prefill {tokens}", partial(prefill_row, tokens, kv_heads, 4, kernels)

    decodes = ((128, 1),) if smoke else DECODES
    prefills = (64,) if smoke else PREFILLS
    for tokens, batch in decodes[:2]:
        yield from decode(tokens, batch)
    for rounding in Rounding:
        fmt = HackFormat(128, 64, rounding=rounding)
        yield f"seal {rounding}", partial(seal_row, 64 if smoke else 2**17, kv_heads, fmt, kernels)
    yield prefill(prefills[0])
    for tokens, batch in decodes[2:]:
        yield from decode(tokens, batch)
    yield from map(prefill, prefills[1:])


def main() -> None:
    """Checks, then measurements."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, for TRITON_INTERPRET=1")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="begin nothing after this long"
    )
    arguments = parser.parse_args()
    began = monotonic()
    try:
        kernels = load("triton")
    except BackendUnavailable as error:
        sys.exit(f"bench.gpu: {error}")
    assert isinstance(kernels, TritonKernels)
    on_gpu = kernels.device.type == "cuda"
    machine: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(kernels.device) if on_gpu else "none (interpreted)",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": round(copy_bandwidth(kernels.device, 2048 if on_gpu else 16)),
    }
    results = Results(machine, arguments.out)
    run_checks(results, began + CHECKS_SHARE * arguments.budget, smoke=arguments.smoke)
    results.write()
    print(f"{results.checks_passed} checks passed, {len(results.failures)} failed", flush=True)
    print(HEADER)
    for name, run in measurements(kernels, results, smoke=arguments.smoke):
        if monotonic() - began > arguments.budget:
            results.skipped.append(f"{name}: out of time")
            continue
        try:
            results.rows.append(run())
        except Exception as error:  # noqa: BLE001
            results.failures[name] = str(error) or type(error).__name__
            print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        finally:
            if on_gpu:
                torch.cuda.empty_cache()
        print(line(results.rows[-1]), flush=True)
        results.write()
    results.write()
    if results.skipped:
        print(f"left out: {'; '.join(results.skipped)}", flush=True)
    sys.exit(1 if results.failures else 0)


if __name__ == "__main__":
    main()
