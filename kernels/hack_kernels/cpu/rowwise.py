"""A model's operations on rows, one C++ call each. The binding checks the arguments of calls in a decode step,
because a check costs more in Python than in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.rowwise import Rowwise


class RowwiseCpu(Rowwise):
    """Implements `RowKernels`. It inherits operations that are rare or as fast in torch."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Every sum has one order; the weight is read as it rests."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        self._native.product(x, weight, bias, out)
        return out

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """One C++ call; rows stay in the first-level cache."""
        out = torch.empty_like(x)
        self._native.norm(x, more, weight, epsilon, out)
        return out

    def rotate(self, x: Tensor, heads: int, turns: Tensor) -> None:
        """One pass over each row, bit-equal to torch."""
        self._native.rotate(x, heads, turns)

    def turn_heads(self, x: Tensor, matrices: Tensor, shift: Tensor | None = None) -> Tensor:
        """Products as those of `product`, head by head."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._native.turn_heads(x, matrices, shift, out)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """One pass over each row."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._native.gate(x, out)
        return out

    def largest(self, x: Tensor, faulty: Tensor | None = None) -> list[int]:
        """One pass over each row, as integers."""
        found: list[int] = self._native.largest(x)
        for row in () if faulty is None else self.set_in(faulty):
            found[row] = -2
        return found

    def append(self, pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> None:
        """C++ rounds all rows before it writes any. If one is faulty it writes none, and torch writes the others."""
        if not self._native.append(pool.open_k, pool.open_v, spans.starts, spans.slots, k, v):
            super().append(pool, spans, k, v, faulty)
