"""Products of a model's matrices: our own for few rows, the library's for many.

Our own read a weight as it rests and form every sum in one order (`RowKernels.product`), so a row does not depend on
the rows beside it. A model that uses no other products is *batch invariant*. The library is faster from some number of
rows on: in BF16 from some hundred rows on where our own multiply matrices too (AMX), from some dozens where both have
`vdpbf16ps`, never where the processor has no instructions for BF16. So each processor is measured once, at the first
load, and the answer is kept.

Packed weights (`hack_kernels.block_weight`) are multiplied as they rest by our own kernels, as integers. For the
library they are turned into numbers, for one call. That pays from some hundred rows on where the library is fast, as on
AMX; the same measurement decides.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from hack_kernels.base import RowKernels
from hack_kernels.block_weight import BlockWeight, Weight, quantized
from torch import Tensor

from hackkv.store import Key, Passing, Store

Product: TypeAlias = Callable[[Tensor, Any], Tensor]
"""(x [rows, in], weight [out, in]) -> [rows, out]; the weight is of x's dtype, or packed."""

ALWAYS: Final = 0
"""A value of `library_rows`: the library multiplies any number of rows."""
NEVER: Final = sys.maxsize
"""A value of `library_rows`: the library never multiplies, so the model is batch invariant."""
ROWS: Final = (1, 4, 16, 64, 128, 256)
"""Numbers of rows that are tried."""
SIDE: Final = 1024
"""Inputs and outputs of the weight that is tried: typical, and small enough for slow processors."""
ROUNDS: Final = 8
SECONDS: Final = 0.03
WAITED_S: Final = 1e-4
PATIENCE_S: Final = 0.15
"""Ours and the library's products are timed alternately, for at least `ROUNDS` rounds and `SECONDS`. The shortest times
count. A call is no round if its threads waited for a processor longer than `WAITED_S`: a thread that wakes waits for
microseconds, and for milliseconds behind other work. After `PATIENCE_S` such calls count as well, and the answer is
kept for a while only."""
GAIN: Final = 1.1
"""The library takes over where it is at least this many times faster."""

VERSION: Final = "6"
"""Increases with every change of our products or of how they are timed: earlier measurements are repeated."""

_THREADS: Final = Path("/proc/self/task")
_STORE: Final = Store("products", int, "who multiplies faster")


def library_rows(own: Product, dtype: torch.dtype, isa: str) -> int:
    """Rows from which on the library multiplies faster than `own`, whose instruction set is `isa`; `NEVER` if at none
    of `ROWS`. Measured once for a processor and number of threads: some tenths of a second."""
    return _STORE.remembered(_key(dtype, isa, "numbers"), lambda: _settled(measure(own, dtype)))


def unpack_rows(kernels: RowKernels, bits: int, dtype: torch.dtype, isa: str) -> int:
    """`library_rows` for weights packed in `bits` bits, which are unpacked for the library."""

    def library(x: Tensor, weight: BlockWeight) -> Tensor:
        return F.linear(x, kernels.unpack(weight, x.dtype))

    def takes_over() -> int | Passing[int]:
        return _settled(measure(kernels.product, dtype, library, lambda weight: quantized(weight, bits)))

    return _STORE.remembered(_key(dtype, isa, f"int{bits}"), takes_over)


def _key(dtype: torch.dtype, isa: str, weights: str) -> Key:
    capabilities = torch.cpu.get_capabilities()
    instructions = " ".join(sorted(name for name, present in capabilities.items() if present is True))
    return (
        ("version", VERSION),
        ("weights", weights),
        ("dtype", str(dtype)),
        ("kernels", isa),
        ("torch", torch.__version__),
        ("threads", str(torch.get_num_threads())),
        ("processor", f"{capabilities.get('cpu_name', '')} {instructions}"),
    )


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Times of our own products and of the library's."""

    seconds: Mapping[int, tuple[float, float]]
    """Rows, ascending -> (our time, the library's)."""
    disturbed: bool
    """Whether other work disturbed some of the times."""


def _settled(measured: ProductTimes) -> int | Passing[int]:
    found = takeover(measured.seconds)
    return Passing(found) if measured.disturbed else found


def _as_numbers(weight: Tensor) -> Weight:
    return weight


def takeover(seconds: Mapping[int, tuple[float, float]]) -> int:
    """The smallest number of rows from which on the library is always faster, by `GAIN`; `NEVER` if there is none.

    `seconds`: rows, ascending -> (our time, the library's).
    """
    found = NEVER
    for rows, (ours, library) in reversed(list(seconds.items())):
        if ours < GAIN * library:
            break
        found = rows
    return found


@torch.inference_mode()
def measure(
    own: Product, dtype: torch.dtype, library: Product = F.linear, form: Callable[[Tensor], Weight] = _as_numbers
) -> ProductTimes:
    """The shortest times of `own` and of the library, timed alternately, with a weight that `form` makes."""
    x, weight = (torch.full(shape, 0.5, dtype=dtype) for shape in ((ROWS[-1], SIDE), (SIDE, SIDE)))
    made = {rows: _alternating((own, library), x[:rows], form(weight)) for rows in ROWS}
    seconds = {rows: (ours.shortest, others.shortest) for rows, (ours, others) in made.items()}
    return ProductTimes(seconds, any(each.calm == 0 for pair in made.values() for each in pair))


@dataclass(slots=True)
class _Times:
    """The times of one product."""

    calm: int = 0
    """Calls whose threads did not wait for a processor."""
    best: float = math.inf
    """Seconds of the shortest calm call."""
    any: float = math.inf
    """Seconds of the shortest call."""

    @property
    def shortest(self) -> float:
        return self.best if self.calm else self.any

    def add(self, seconds: float, *, calm: bool) -> None:
        self.any = min(self.any, seconds)
        if calm:
            self.calm, self.best = self.calm + 1, min(self.best, seconds)


def _alternating(products: tuple[Product, Product], x: Tensor, weight: Weight) -> tuple[_Times, _Times]:
    times, spent, rounds = (_Times(), _Times()), 0.0, 0
    while rounds < ROUNDS or (spent < PATIENCE_S and (spent < SECONDS or min(each.calm for each in times) < ROUNDS)):
        rounds += 1
        for each, product in zip(times, products, strict=True):
            before, began = waited_s(), perf_counter()
            product(x, weight)
            took = perf_counter() - began
            each.add(took, calm=waited_s() - before <= WAITED_S)
            spent += took
    return times


def waited_s() -> float:
    """Seconds for which runnable threads of this process have waited for a processor, in all. Linux counts them; 0
    elsewhere."""
    waited_ns = 0
    for thread in _THREADS.glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            waited_ns += int(thread.read_bytes().split()[1])
    return 1e-9 * waited_ns
