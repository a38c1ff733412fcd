"""Rotations of a layer's heads before and after attention, for codecs that rotate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadRotations:
    """Matrices [Hkv, D, D], or [1, D, D] for all KV heads; float32, contiguous or from `RowKernels.lay_out`."""

    query: Tensor
    """q' = query @ q."""
    key: Tensor
    """k' = key @ k + shift."""
    shift: Tensor | None = None
    """[Hkv, D]"""
    value: Tensor | None = None
    """v' = value @ v; None where V stays as it is."""
    out: Tensor | None = None
    """Rotates the output of attention on V' back: out @ out'. None if `value` is None."""

    def heads(self, start: int, count: int) -> HeadRotations:
        """The rotations of KV heads [start, start + count)."""
        if all(x is None or x.shape[0] in (1, count) for x in (self.key, self.value)):
            return self
        return self._each(lambda x: x if x.shape[0] in (1, count) else x[start : start + count])

    def placed(self, device: torch.device, lay_out: Callable[[Tensor], Tensor]) -> HeadRotations:
        """A copy on another device, its matrices as `lay_out` of that device's `RowKernels` returns them."""
        copy = self._each(lambda x: x.to(device))
        return replace(copy._each(lay_out), shift=copy.shift)

    def _each(self, change: Callable[[Tensor], Tensor]) -> HeadRotations:
        others = (None if x is None else change(x) for x in (self.shift, self.value, self.out))
        return HeadRotations(change(self.query), change(self.key), *others)
