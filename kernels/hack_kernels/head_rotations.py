"""Rotations of a layer's heads before and after attention, for codecs that rotate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadRotations:
    """Matrices [Hkv, D, D], or [1, D, D] for all KV heads; float32, contiguous."""

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

    def to(self, device: torch.device) -> HeadRotations:
        """A copy on another device."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> HeadRotations:
        others = (None if x is None else change(x) for x in (self.shift, self.value, self.out))
        return HeadRotations(change(self.query), change(self.key), *others)
