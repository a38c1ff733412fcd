"""The page format of integer codes whose groups share a scale, which published rivals of HACK use and dequantize.

x^ = s·c + m, where a *group* of values shares the scale s and the minimum m. A group is some rows of one channel or
some channels of one row. Centred codes have no minimum: x^ = a·(c - C) / C with a the largest magnitude of the row.
Planes in wire order, the contract of `install` and `export` (those of `v` follow):

=========  ===========================  =======  ==============================================================
plane      shape                        dtype    meaning
=========  ===========================  =======  ==============================================================
k_codes    [Π·b/8, D]                   uint8    codes of b bits, packed along rows (`read_format.py`)
k_high     [Π/8, D]                     uint8    only with 5 bits: the highest
k_scale    [Π/G, D] or [Π, D/G]         float16  s of each group, or a of each row
k_min      like k_scale                 float16  m; not with centred codes
=========  ===========================  =======  ==============================================================

Quantizing is that of `hack` (`quantize.py`). m is the least value; s = (most - least) / (2^b - 1) rounded up to FP16, 1
where all values are equal; c = floor((x - m) / s + 0.5). Centred: c = round(x·C / a) + C, ties to even; a row of zeros
has a = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from hack_kernels.base import Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import ReadFormat, packed_planes

WIDTHS: Final = (2, 4, 5)
"""Bits of a code."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """How K or V is kept."""

    bits: int
    group: int
    """G: values that share a scale."""
    by_channel: bool = False
    """Whether a group lies along the rows of a channel; else along the channels of a row."""
    centre: int = 0
    """C of centred codes; 0 where groups have a minimum."""

    def check(self, name: str, head_dim: int, page_tokens: int) -> None:
        """Raises `ValueError` naming what does not fit."""
        along = page_tokens if self.by_channel else head_dim
        if self.bits not in WIDTHS:
            raise ValueError(f"{name}: codes of {self.bits} bits; known: {WIDTHS}")
        if self.group < 1 or along % self.group:
            what = "page_tokens" if self.by_channel else "head_dim"
            raise ValueError(f"{name}: groups of {self.group} do not divide {what}, which is {along}")
        if self.centre and (self.by_channel or self.group != head_dim or 2 * self.centre >= 2**self.bits):
            raise ValueError(f"{name}: codes around {self.centre} need {self.bits} bits and one scale a row")


@dataclass(frozen=True)
class GroupFormat(ReadFormat):
    """See the head of this file. Raises `ValueError` naming a shape that groups do not divide."""

    head_dim: int
    k: Grouping
    v: Grouping
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fused: bool = True

    def __post_init__(self) -> None:
        """Check that groups are whole."""
        if self.page_tokens % 8:
            raise ValueError(f"page_tokens is {self.page_tokens}; it must be a multiple of 8")
        for name in ("k", "v"):
            self.side(name).check(name, self.head_dim, self.page_tokens)

    def side(self, name: str) -> Grouping:
        """The settings of "k" or "v"."""
        return self.k if name == "k" else self.v

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then the planes of V."""
        return (*self._planes_of("k"), *self._planes_of("v"))

    def _planes_of(self, name: str) -> tuple[Plane, ...]:
        side, pi, d = self.side(name), self.page_tokens, self.head_dim
        shape = (pi // side.group, d) if side.by_channel else (pi, d // side.group)
        planes = (
            *packed_planes(name, side.bits, pi, d, "_codes"),
            Plane(f"{name}_scale", torch.float16, shape),
        )
        return planes if side.centre else (*planes, Plane(f"{name}_min", torch.float16, shape))
