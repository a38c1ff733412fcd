"""Matrix products of a model, ours beside the library's: `python -m bench.products [--threads N] [--out docs]`.

Shapes are those of the shipped model and of SmolLM2-135M; rows are those of a decode step and of a prefill pass. Each
pair is measured alternately in one run, and the median counts. "Cold" rows begin with nothing of theirs in the caches,
as a decode step finds its weights; all others find the weight there.

Packed weights have two rivals: the library with weights that are unpacked for each call, and torch's own packed
products. The latter have other forms (codes of 8 bits with one scale per row of the weight, of 4 bits in groups of 32
with BF16 scales), and they only multiply.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch
import torch.nn.functional as F
from hack_kernels.block_weight import BLOCK, quantized
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import supported_isas
from torch import Tensor

from bench.cluster import load_note
from bench.sections import write_section
from measure.accuracy.machine import this_machine

SHAPES: Final = ((256, 768), (576, 960), (576, 3072), (1536, 576))
"""(inputs, outputs)"""
ROWS: Final = (1, 8, 64, 512)
COLD: Final = (1, 8)
"""Rows that are timed cold, too."""
SWEPT_BYTES: Final = 128 << 20
"""Bytes that are read before a cold call; more than the caches hold."""
ROUNDS: Final = 15
HEAD: Final = (
    "| weights | inputs x outputs | rows | instruction set | ours, GF/s | library, GF/s | library's time to ours "
    "| torch's packed product's time to ours |"
)


@dataclass(frozen=True, slots=True)
class Form:
    """The stored form of a weight, and the dtype of rows."""

    dtype: torch.dtype
    bits: int | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name if self.bits is None else f"int{self.bits}, {name} rows"


FORMS: Final = (Form(torch.float32), Form(torch.bfloat16), Form(torch.bfloat16, 8), Form(torch.bfloat16, 4))


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.products", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began, lines = load_note(), list[str]()
    print(HEAD)
    for form in FORMS:
        for shape in SHAPES:
            for rows, cold in [*((rows, False) for rows in ROWS), *((rows, True) for rows in COLD)]:
                for isa in supported_isas():
                    if isa != "portable":
                        lines.append(row(CpuBackend(isa, args.threads), form, shape, rows, cold))
                        print(lines[-1], flush=True)
    if args.out:
        unit = bf16_unit()
        where = f"{this_machine('', args.threads).cpu}, {args.threads} threads, {began}"
        about = f"`python -m bench.products --threads {args.threads} --out docs` · {where}"
        text = "\n".join((f"## Matrix products, {unit} for BF16", "", about, "", HEAD, "|" + "---|" * 8, *lines))
        write_section(args.out, f"products-{unit}", text, {"where": where, "rows": lines})


def bf16_unit() -> str:
    """The unit that multiplies in BF16 on this processor. Each unit has a section of its own."""
    present = torch.cpu.get_capabilities()
    return next((unit for unit in ("amx_bf16", "avx512_bf16") if present.get(unit)), "fp32").replace("_", "-")


def row(backend: CpuBackend, form: Form, shape: tuple[int, int], rows: int, cold: bool = False) -> str:
    """A line of the table for x [rows, inputs] and a weight [outputs, inputs]."""
    (inputs, outputs), kernels = shape, backend.rows
    x, weight = torch.randn(rows, inputs).to(form.dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(form.dtype)
    if form.bits is None:
        calls = [lambda: kernels.product(x, weight), lambda: F.linear(x, weight)]
    else:
        packed = quantized(weight, form.bits)
        calls = [
            lambda: kernels.product(x, packed),
            lambda: F.linear(x, kernels.unpack(packed, x.dtype)),
            packed_in_torch(x, outputs, form.bits),
        ]
    ours, library, *others = alternating(*calls, cold=cold)
    speeds = " | ".join(f"{2e-9 * rows * inputs * outputs / seconds:.3g}" for seconds in (ours, library))
    other = "".join(f"{seconds / ours:.3g}" for seconds in others)
    which = f"{rows}, cold" if cold else rows
    return f"| {form} | {inputs} x {outputs} | {which} | {backend.isa} | {speeds} | {library / ours:.3g} | {other} |"


def packed_in_torch(x: Tensor, outputs: int, bits: int) -> Callable[[], Tensor]:
    """torch's product of x and a weight of random codes."""
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, x.shape[1]), dtype=torch.int8)
        scales = torch.full((outputs,), 0.01, dtype=x.dtype)
        return lambda: torch._weight_int8pack_mm(x, codes, scales)
    wide = torch.randint(0, 16, (outputs, x.shape[1]), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(wide, 2)
    groups = torch.full((x.shape[1] // BLOCK, outputs, 2), 0.01, dtype=x.dtype)
    return lambda: torch._weight_int4pack_mm_for_cpu(x, packed, BLOCK, groups)


def alternating(*calls: Callable[[], Tensor], cold: bool) -> list[float]:
    """Median seconds of each call."""
    seconds: list[list[float]] = [[] for _ in calls]
    swept = torch.zeros(SWEPT_BYTES * cold, dtype=torch.uint8).view(torch.int64)
    for _ in range(ROUNDS + 1):
        for call, spent in zip(calls, seconds, strict=True):
            swept.sum()
            began = perf_counter()
            call()
            spent.append(perf_counter() - began)
    return [median(spent[1:]) for spent in seconds]  # the first round warms caches


if __name__ == "__main__":
    with torch.inference_mode():
        main()
