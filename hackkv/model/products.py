"""Who multiplies a model's matrices: our own products for few rows, the library's for many.

Our own read a weight as it rests and form every sum in one order (`RowKernels.product`), so a row does not depend on
the rows beside it. A model that uses no other products is *batch invariant*. The library is faster from some number of
rows on: in BF16 from a few rows on where the processor multiplies matrices (AMX), never where it has no instructions
for BF16, and somewhere between on others. So each processor is asked once, at the first load, and remembered.

Rejected: weights in the library's own order. At 64 rows they save up to a fifth of a product, from 256 rows on nothing
(`python -m bench.products`), and mapped weights would become each process's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hackkv.store import Store

Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(x [rows, in], weight [out, in]) -> [rows, out], all of one dtype."""

ALWAYS: Final = 0
"""From so many rows on the library multiplies: here at all times."""
NEVER: Final = sys.maxsize
"""The same: a model that is batch invariant."""
ROWS: Final = (1, 4, 16, 64, 256)
"""Numbers of rows that are tried."""
SIDE: Final = 1024
"""Inputs and outputs of the weight that is tried: typical, and small enough for slow processors."""
ROUNDS: Final = 3
GAIN: Final = 1.1
"""The library takes over where it is at least so many times faster."""

_STORE: Final = Store("products", int, "who multiplies faster")


def library_rows(own: Product, dtype: torch.dtype, isa: str) -> int:
    """Rows from which on the library multiplies faster than `own`, whose instruction set is `isa`; `NEVER` if at none
    of `ROWS`. Measured once for a processor and number of threads: some tenths of a second."""
    capabilities = torch.cpu.get_capabilities()
    instructions = " ".join(sorted(name for name, present in capabilities.items() if present is True))
    key = (
        ("dtype", str(dtype)),
        ("kernels", isa),
        ("torch", torch.__version__),
        ("threads", str(torch.get_num_threads())),
        ("processor", f"{capabilities.get('cpu_name', '')} {instructions}"),
    )
    return _STORE.remembered(key, lambda: takeover(measure(own, dtype)))


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
def measure(own: Product, dtype: torch.dtype) -> dict[int, tuple[float, float]]:
    """Rows -> the shortest times in seconds of `own` and of the library, in turns."""
    x, weight = (torch.full(shape, 0.5, dtype=dtype) for shape in ((ROWS[-1], SIDE), (SIDE, SIDE)))
    return {rows: _in_turns(own, F.linear, x[:rows], weight) for rows in ROWS}


def _in_turns(own: Product, library: Product, x: Tensor, weight: Tensor) -> tuple[float, float]:
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS + 1):  # the first round warms caches, and cannot be the shortest by luck
        for who, product in enumerate((own, library)):
            began = perf_counter()
            product(x, weight)
            best[who] = min(best[who], perf_counter() - began)
    return best[0], best[1]
