"""The page format of deltas against anchor rows, as CacheGen's paper has them (arXiv 2310.07240, section 5.2, Fig. 6).

The rows of a page are cut into groups of ten; the last group of a page may be shorter. The first row of a group, its
*anchor*, is quantized by itself, in 8 bits, because every row of the group depends on it. The other rows' differences
from the anchor, the *deltas*, are quantized in few bins. A delta is taken from the anchor as it will be read, so the
anchor's error is part of the delta and does not add to its error. No group spans two pages, so a page's bytes follow
from its own rows.
Planes in wire order, the contract of `install` and `export` (those of `v` follow). A rows are anchors, N = Π - A are
not; both kinds keep their order. They lie in separate planes, so that a wire that codes planes has a table for each:

=========  ====================  =======  ======================================================================
plane      shape                 dtype    meaning
=========  ====================  =======  ======================================================================
k_anchor   [A, D]                uint8    codes of anchors around 127
k_codes    [ceil(N·b/8), D]      uint8    codes of deltas, b bits, packed along rows (`read_format.py`); of 5 bits 4
k_high     [ceil(N/8), D]        uint8    only with 5 bits: the highest
k_scale    [Π, 1]                float16  of an anchor its largest magnitude a; of a delta half its reach r
=========  ====================  =======  ======================================================================

An anchor is a·(c - 127) / 127; any other row is its anchor + r·(c - C) / C, in FP32 without fused operations. Codes
round to nearest, ties to even. r is the largest magnitude of the delta. Half of r is stored, rounded up to FP16,
because the difference of two FP16 rows may be twice what FP16 holds. For zeros a and r/2 are 1. Zero codes fill the
last byte up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import LOW_BITS, ReadFormat

GROUP_ROWS: Final = 10
"""Rows of a group: the paper's ten contiguous tokens."""
ANCHOR_CENTRE: Final = 127
WIDTHS: Final = (4, 5)
"""Bits of a delta's code."""


@dataclass(frozen=True, slots=True)
class DeltaSide:
    """How the deltas of K or V are kept."""

    bits: int
    centre: int
    """C: codes are 0 to 2C."""


@dataclass(frozen=True)
class DeltaFormat(ReadFormat):
    """See the head of this file. Raises `ValueError` naming what does not fit."""

    head_dim: int
    k: DeltaSide
    v: DeltaSide
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fused: bool = True
    group: int = GROUP_ROWS

    def __post_init__(self) -> None:
        """Check that codes fit their bits, and that there are deltas."""
        if not 2 <= self.group <= self.page_tokens:
            raise ValueError(f"groups of {self.group} rows in pages of {self.page_tokens}; at least 2, at most a page")
        for name in ("k", "v"):
            side = self.side(name)
            if side.bits not in WIDTHS or not 1 <= side.centre < 2 ** (side.bits - 1):
                raise ValueError(f"{name}: codes around {side.centre} in {side.bits} bits; known: {WIDTHS}")

    def side(self, name: str) -> DeltaSide:
        """The settings of "k" or "v"."""
        return self.k if name == "k" else self.v

    @property
    def anchors(self) -> Tensor:
        """[A] int64: the numbers of the rows of a page that are anchors."""
        return torch.arange(0, self.page_tokens, self.group)

    @property
    def others(self) -> Tensor:
        """[N] int64: the numbers of the rows of a page that are not anchors."""
        rows = torch.arange(self.page_tokens)
        return rows[rows % self.group != 0]

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then the planes of V."""
        return (*self._planes_of("k"), *self._planes_of("v"))

    def _planes_of(self, name: str) -> tuple[Plane, ...]:
        bits, d = self.side(name).bits, self.head_dim
        anchors = -(-self.page_tokens // self.group)
        others, low = self.page_tokens - anchors, LOW_BITS.get(bits, bits)
        high = (Plane(f"{name}_high", torch.uint8, (-(-others * (bits - low) // 8), d)),) if bits > low else ()
        return (
            Plane(f"{name}_anchor", torch.uint8, (anchors, d)),
            Plane(f"{name}_codes", torch.uint8, (-(-others * low // 8), d)),
            *high,
            Plane(f"{name}_scale", torch.float16, (self.page_tokens, 1)),
        )
