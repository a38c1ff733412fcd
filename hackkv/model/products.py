"""Who multiplies a model's matrices: our own products for few rows, the library's for many.

Our own read a weight as it rests and form every sum in one order (`RowKernels.product`), so a row does not depend on
the rows beside it. A model that uses no other products is *batch invariant*. The library is faster from some number of
rows on: in BF16 from a few rows on where the processor multiplies matrices (AMX), never where it has no instructions
for BF16, and somewhere between on others. So each processor is asked once, at the first load, and remembered.

Packed weights (`hack_kernels.block_weight`) are multiplied as they rest by our own kernels. For the library they are
turned into numbers, for one call: from some number of rows on that pays, and the same question settles it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from hack_kernels.base import RowKernels
from hack_kernels.block_weight import BlockWeight, Weight, quantized
from torch import Tensor

from hackkv.store import Key, Store

Product: TypeAlias = Callable[[Tensor, Any], Tensor]
"""(x [rows, in], weight [out, in]) -> [rows, out]; the weight is of x's dtype, or packed."""

ALWAYS: Final = 0
"""From so many rows on the library multiplies: here at all times."""
NEVER: Final = sys.maxsize
"""The same: a model that is batch invariant."""
ROWS: Final = (1, 4, 16, 64, 256)
"""Numbers of rows that are tried."""
SIDE: Final = 1024
"""Inputs and outputs of the weight that is tried: typical, and small enough for slow processors."""
ROUNDS: Final = 8
SECONDS: Final = 0.03
"""Both are timed in turns for so many rounds and so long, at least, and the shortest times count: other work on the
machine makes some rounds longer, and would have to last for all of them."""
GAIN: Final = 1.1
"""The library takes over where it is at least so many times faster."""

VERSION: Final = "2"
"""Increases with every change of our products or of how they are timed: what was measured before is asked again."""

_STORE: Final = Store("products", int, "who multiplies faster")


def library_rows(own: Product, dtype: torch.dtype, isa: str) -> int:
    """Rows from which on the library multiplies faster than `own`, whose instruction set is `isa`; `NEVER` if at none
    of `ROWS`. Measured once for a processor and number of threads: some tenths of a second."""
    return _STORE.remembered(_key(dtype, isa, "numbers"), lambda: takeover(measure(own, dtype)))


def unpack_rows(kernels: RowKernels, bits: int, dtype: torch.dtype, isa: str) -> int:
    """The same for weights packed in `bits` bits, which are unpacked for the library."""

    def library(x: Tensor, weight: BlockWeight) -> Tensor:
        return F.linear(x, kernels.unpack(weight, x.dtype))

    def takes_over() -> int:
        return takeover(measure(kernels.product, dtype, library, lambda weight: quantized(weight, bits)))

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
) -> dict[int, tuple[float, float]]:
    """Rows -> the shortest times in seconds of `own` and of the library, in turns, with a weight that `form` makes."""
    x, weight = (torch.full(shape, 0.5, dtype=dtype) for shape in ((ROWS[-1], SIDE), (SIDE, SIDE)))
    return {rows: _in_turns(own, library, x[:rows], form(weight)) for rows in ROWS}


def _in_turns(own: Product, library: Product, x: Tensor, weight: Weight) -> tuple[float, float]:
    best, spent, rounds = [float("inf"), float("inf")], 0.0, 0
    while spent < SECONDS or rounds < ROUNDS:
        rounds += 1
        for who, product in enumerate((own, library)):
            began = perf_counter()
            product(x, weight)
            took = perf_counter() - began
            best[who], spent = min(best[who], took), spent + took
    return best[0], best[1]
