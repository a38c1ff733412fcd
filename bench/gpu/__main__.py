"""Check every GPU kernel against the reference, then time them beside BF16 attention and dequantization.

One command, unattended: `PYTHONPATH=kernels python -m bench.gpu`. It needs torch, Triton, numpy and `hack_kernels`
from this checkout. Rows of the engine (`engine.py`) need `WHEELS` too, and are left out by name without them. Checks
run side by side in several processes, which also compile the kernels that are timed later. Then rows are timed, one at
a time, in a process that is replaced if a kernel breaks it. Results are written as they come, as JSON and as a
Markdown table, the most important first. After `--budget` seconds everything ends, and the results name what was left
out. The exit status is 1 if a check or a row failed. `--smoke` runs the same logic on tiny shapes, for Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from zlib import crc32

import torch
import triton
from hack_kernels import load
from hack_kernels.base import BackendUnavailable
from hack_kernels.hack_format import HackFormat, Rounding
from hack_kernels.triton.backend import TritonBackend

from bench.gpu.checks import checks
from bench.gpu.processes import Answer, Task, answers
from bench.gpu.shapes import Row, decode_bytes, decode_row, prefill_row, rotation_row, seal_row
from bench.gpu.timing import copy_bandwidth, warm_up

BUDGET_S = 500
"""Seconds. With the start of Python and the end of a process, the run stays below 9 minutes."""
CHECKS_SHARE = 0.4
"""The largest share of the budget for checks. A check mostly compiles its kernels, so several processes run checks."""
CHECKING_PROCESSES = 16
ROW_S = 90
"""The most seconds for one row. A row whose kernels are compiled takes a few."""
WHEELS = (
    *("pydantic", "pyyaml", "xxhash", "safetensors", "rich", "llguidance", "platformdirs"),
    *("grpcio", "grpcio-health-checking", "protobuf"),
)
"""Packages for `pip install` that the engine's rows need, without the dependencies of these packages."""
REHEARSED_TOKENS = 1024
"""Long enough that Triton compiles the same kernel as for the timed lengths: a table row has 16 pages."""
DECODES = (
    *((2**17, 1), (2**15, 8)),
    *((2**17, 8), (2**15, 1), (2**14, 1), (2**12, 1), (2**14, 8), (2**12, 8)),
    *((2**15, 32), (2**12, 32), (2**14, 32), (2**17, 32)),
)
"""(tokens, batch); those with a target of their own come first."""
PREFILLS = (2**14, 2**15, 2**12, 2**13)

HEADER = "| what | shape | us | faster than BF16 | GB/s | tokens/s | target |\n|---|---|---|---|---|---|---|"


@dataclass(slots=True)
class Results:
    """The results so far; they are written to `folder` after every change."""

    machine: dict[str, object]
    folder: Path
    checks_passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seed: int = 0
    """`--seed` repeats the inputs of a run."""

    def seeded(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks, each with a seed of its own that depends on the run's seed and on the task's name."""
        return [replace(task, seed=crc32(task.name.encode(), self.seed)) for task in tasks]

    def fail(self, answer: Answer) -> None:
        """Keep the last line of a failure and print all of it."""
        self.failures[answer.name] = answer.failure.strip().splitlines()[-1]
        print(f"FAILED {answer.name} (--seed {self.seed})\n{answer.failure}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write both files, each in one step."""
        content = {name: getattr(self, name) for name in ("machine", "seed", "checks_passed", "failures", "skipped")}
        rows = [asdict(row) for row in self.rows]
        self._replace("gpu.json", json.dumps(content | {"rows": rows}, indent=1))
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [about, "", f"{self.checks_passed} checks passed, {len(self.failures)} failures.", "", HEADER]
        failed = [f"\nFailed: {name}: {reason}" for name, reason in self.failures.items()]
        left_out = [f"\nLeft out: {'; '.join(self.skipped)}."] if self.skipped else []
        self._replace("gpu.md", "\n".join([*lines, *map(line, self.rows), *failed, *left_out, ""]))

    def _replace(self, name: str, text: str) -> None:
        """Replace a file in one step, so that a process that is killed leaves no partial file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)


def line(row: Row) -> str:
    """A row of the Markdown table."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in row.us.items())
    ratio = "" if row.faster_than_bf16 is None else f"{row.faster_than_bf16:.2f}x"
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
    tokens = "" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
    return f"| {row.what} | {row.shape} | {times} | {ratio} | {rate} | {tokens} | {row.target} |"


def rehearsals(*, smoke: bool) -> Iterator[Task]:
    """The rows that are timed later, on short sequences. Triton keeps the compiled kernels; the times are not used."""
    for rounding in Rounding:
        fmt = HackFormat(128, 64, rounding=rounding)
        yield Task(
            f"rehearsed seal {rounding}", partial(seal_row, 64 if smoke else REHEARSED_TOKENS, 1 if smoke else 8, fmt)
        )
    if smoke:
        return
    yield Task("rehearsed prefill", partial(prefill_row, REHEARSED_TOKENS, 8, 4))
    for batch in sorted({batch for _, batch in DECODES}):
        for group in (8, 4):
            yield Task(
                f"rehearsed decode x {batch}, group {group}", partial(decode_row, REHEARSED_TOKENS, batch, 8, group)
            )


def run_checks(results: Results, until: float, *, smoke: bool) -> None:
    """Run rehearsals and checks in a pool of processes."""
    asked = list(checks(smoke=smoke, seed=results.seed))
    waiting = {check.name for check in asked}
    tasks = results.seeded([*rehearsals(smoke=smoke), *asked])
    for answer in answers(tasks, min(os.cpu_count() or 1, 2 if smoke else CHECKING_PROCESSES), until):
        if answer.failure:
            results.fail(answer)
        results.checks_passed += answer.name in waiting and not answer.failure
        waiting.discard(answer.name)
        results.write()
    results.skipped += [f"check {name}: out of time" for name in sorted(waiting)]


def engine_rows(results: Results, *, smoke: bool) -> list[Task]:
    """Rows of whole steps and copies, if the packages that they need are installed."""
    try:
        engine = importlib.import_module("bench.gpu.engine")
    except ModuleNotFoundError as error:
        results.skipped.append(f"engine: {error.name} is missing: pip install {' '.join(WHEELS)}")
        return []
    return list(engine.rows(smoke=smoke))


def measurements(of_engine: Iterable[Task], *, smoke: bool) -> Iterator[tuple[Task, int]]:
    """Every row with the bytes of device memory that it takes; 0 for rows that never take much."""
    kv_heads = 1 if smoke else 8
    groups = (4,) if smoke else (8, 4)

    def decode(tokens: int, batch: int) -> Iterator[tuple[Task, int]]:
        for group in groups:
            run = partial(decode_row, tokens, batch, kv_heads, group)
            yield Task(f"decode {tokens} x {batch}, group {group}", run), decode_bytes(tokens, batch, kv_heads)

    def prefill(tokens: int) -> tuple[Task, int]:
        return Task(f"prefill {tokens}", partial(prefill_row, tokens, kv_heads, 4)), 0

    decodes = ((128, 1),) if smoke else DECODES
    prefills = (64,) if smoke else PREFILLS
    for tokens, batch in decodes[:2]:
        yield from decode(tokens, batch)
    for rounding in Rounding:
        fmt = HackFormat(128, 64, rounding=rounding)
        yield Task(f"seal {rounding}", partial(seal_row, 64 if smoke else 2**17, kv_heads, fmt)), 0
    for count in (32,) if smoke else (32, 2048):
        yield Task(f"rotation {count}", partial(rotation_row, count, kv_heads, 4)), 0
    yield prefill(prefills[0])
    yield from ((task, 0) for task in of_engine)
    for tokens, batch in decodes[2:]:
        yield from decode(tokens, batch)
    yield from map(prefill, prefills[1:])


def run_rows(results: Results, until: float, free: float, *, smoke: bool) -> None:
    """Time one row after another. Rows that need more than `free` bytes of device memory are skipped."""
    tasks, waiting = [], set()
    for task, needed in measurements(engine_rows(results, smoke=smoke), smoke=smoke):
        if needed > free:
            results.skipped.append(f"{task.name}: does not fit memory")
            continue
        tasks.append(task)
        waiting.add(task.name)
    limit_s = math.inf if smoke else ROW_S  # an interpreted row may take as long as it likes
    for answer in answers(results.seeded(tasks), 1, until, limit_s):
        waiting.discard(answer.name)
        if isinstance(answer.result, Row):
            results.rows.append(answer.result)
            print(line(answer.result), flush=True)
        else:
            results.fail(answer)
        results.write()
    results.skipped += [f"{task.name}: out of time" for task in tasks if task.name in waiting]


def about(device: torch.device) -> dict[str, object]:
    """The machine and the versions on which results depend."""
    here = Path(__file__).parent
    found: dict[str, object] = {
        "gpu": "none (interpreted)",
        "commit": said("git", "-C", str(here), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "processors": properties.multi_processor_count, "cuda": torch.version.cuda}
        query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        found["driver, clocks (now, most, memory), power"] = said(
            "nvidia-smi", query, "--format=csv,noheader", f"--id=GPU-{properties.uuid}"
        )
    return found


def said(*command: str) -> str:
    """The first line that a command prints, or the reason why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return (done.stdout or done.stderr).strip().partition("\n")[0] or "unknown"


def main() -> None:
    """Run checks, then measurements."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, for TRITON_INTERPRET=1")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="end after this long")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().getrandbits(32), help="repeats a run's inputs"
    )
    arguments = parser.parse_args()
    began = monotonic()
    try:
        backend = load("triton")
    except BackendUnavailable as error:
        sys.exit(f"bench.gpu: {error}")
    assert isinstance(backend, TritonBackend)
    on_gpu = backend.device.type == "cuda"
    warm_up(backend.device)
    machine = about(backend.device) | {"copy_gb_per_s": round(copy_bandwidth(backend.device, 2048 if on_gpu else 16))}
    free = math.inf
    if on_gpu:
        torch.cuda.empty_cache()
        free = 0.8 * torch.cuda.mem_get_info(backend.device)[0]
    results = Results(machine, arguments.out, seed=arguments.seed)
    results.write()
    run_checks(results, began + CHECKS_SHARE * arguments.budget, smoke=arguments.smoke)
    results.write()
    print(f"{results.checks_passed} checks passed, {len(results.failures)} failures", flush=True)
    print(HEADER)
    run_rows(results, began + arguments.budget, free, smoke=arguments.smoke)
    results.write()
    if results.skipped:
        print(f"left out: {'; '.join(results.skipped)}", flush=True)
    sys.exit(1 if results.failures else 0)


if __name__ == "__main__":
    main()
