"""Matrix products of a model, ours beside the library's: `python -m bench.products [--threads N] [--out docs]`.

Shapes are those of the shipped model and of SmolLM2-135M; rows are a decode step's and a prefill pass's. Each pair is
measured in turns in one run; the median counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch
import torch.nn.functional as F
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas
from torch import Tensor

from bench.cluster import load_note
from bench.sections import write_section
from measure.accuracy.machine import this_machine

SHAPES: Final = ((256, 768), (576, 960), (576, 3072), (1536, 576))
"""(inputs, outputs)"""
ROWS: Final = (1, 8, 64, 512)
DTYPES: Final = (torch.float32, torch.bfloat16)
ROUNDS: Final = 15
HEAD: Final = (
    "| dtype | inputs x outputs | rows | instruction set | ours, GF/s | library, GF/s | library's time to ours |"
)


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.products", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began, lines = load_note(), list[str]()
    print(HEAD)
    for dtype in DTYPES:
        for shape in SHAPES:
            for rows in ROWS:
                for isa in supported_isas():
                    if isa != "portable":
                        lines.append(row(CpuBackend(isa, args.threads), dtype, shape, rows))
                        print(lines[-1], flush=True)
    if args.out:
        where = f"{this_machine('', args.threads).cpu}, {args.threads} threads, {began}"
        about = f"`python -m bench.products --out docs` · {where}"
        text = "\n".join(("## Matrix products", "", about, "", HEAD, "|" + "---|" * 7, *lines))
        write_section(args.out, "products", text, {"where": where, "rows": lines})


def row(backend: CpuBackend, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> str:
    """A line of the table for x [rows, inputs] and a weight [outputs, inputs]."""
    inputs, outputs = shape
    x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    ours, library = in_turns(lambda: backend.rows.product(x, weight), lambda: F.linear(x, weight))
    speeds = " | ".join(f"{2e-9 * rows * inputs * outputs / seconds:.3g}" for seconds in (ours, library))
    name = str(dtype).removeprefix("torch.")
    return f"| {name} | {inputs} x {outputs} | {rows} | {backend.isa} | {speeds} | {library / ours:.3g} |"


def in_turns(*calls: Callable[[], Tensor]) -> list[float]:
    """Median seconds of each call."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, spent in zip(calls, seconds, strict=True):
            began = perf_counter()
            call()
            spent.append(perf_counter() - began)
    return [median(spent[1:]) for spent in seconds]  # the first round warms caches


if __name__ == "__main__":
    with torch.inference_mode():
        main()
