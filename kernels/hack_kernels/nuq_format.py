"""The page format of codes on non-uniform levels with outliers aside: KVQuant (arXiv 2401.18079, sections 3.1 to 3.6).

The values of a *vector* share a range lo, hi. A vector of K is the rows of one channel of a page (3.1), a vector of V
the channels of one row. A few values of a vector, its *outliers*, are kept as they are (3.4). With z = (hi + lo) / 2
and r = (hi - lo) / 2 the other values are x^ = pole·r + z. A layer has its own *poles*, 2^b numbers from -1 to 1 (3.3,
nuq). Planes in wire order, the contract of `install` and `export` (those of `v` follow; N vectors):

=========  ============  =======  ========================================================================
plane      shape         dtype    meaning
=========  ============  =======  ========================================================================
k_codes    [Π·b/8, D]    uint8    numbers of poles, b bits, packed along rows (`read_format.py`); of 3 bits 2
k_high     [Π/8, D]      uint8    only with 3 bits: the highest
k_range    [2, N]        float16  lo and hi of each vector; not of K of a calibrated format
k_at       [2, N]        uint8    where in its vector an outlier stands
k_out      [2, N]        float16  the outlier
k_first    [1]           float32  only of K of a calibrated format: the number of the page's first row
=========  ============  =======  ========================================================================

Without calibration a vector's outliers are its least and its largest value, the first of equals, and lo and hi are the
bounds of the rest. With calibration K has lo and hi by layer, head and channel (3.6); its outliers are the value
farthest from z and the farthest of the others. K then rests as it was before the rotary embedding (3.2): row t is
rotated back by t times the frequencies of its channel pairs, in FP32, and rounded to FP16. Reading rotates it again. A
vector's number of outliers is fixed, so pages have one size.

A code is the number of bounds below x. Bounds are z + r·(the middle of two poles), in FP32 without fused operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Final, Protocol

import torch
from torch import Tensor

from hack_kernels.base import PageKernels, Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import ReadFormat, packed_planes

OUTLIERS: Final = 2
"""Outliers of a vector."""

WIDTHS: Final = (2, 3, 4)
"""Bits of a code."""

MOST_VALUES: Final = 256
"""The most values in a vector, because places are bytes."""

CUT: Final = 2.0
"""Where the normal distribution is cut, in standard deviations. Its poles serve where there is no calibration."""

LARGEST: Final = 65504.0


@dataclass(frozen=True, slots=True)
class NuqSide:
    """How K or V is kept."""

    bits: int
    by_channel: bool
    ranged: bool
    """Whether pages hold the ranges of vectors; else a calibration has them."""


@dataclass(frozen=True)
class NuqFormat(ReadFormat):
    """See the head of this file. Raises `ValueError` naming what does not fit."""

    head_dim: int
    k_bits: int
    v_bits: int
    calibrated: bool = False
    """Whether `NuqKernels.calibrate` gives a layer's poles and ranges, and K rests unrotated."""
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fused: bool = True

    def __post_init__(self) -> None:
        """Check that widths are known and that places fit bytes."""
        for name in ("k", "v"):
            if self.side(name).bits not in WIDTHS:
                raise ValueError(f"{name}: codes of {self.side(name).bits} bits; known: {WIDTHS}")
        if self.page_tokens % 8 or self.page_tokens > MOST_VALUES:
            raise ValueError(f"page_tokens is {self.page_tokens}; it must be a multiple of 8 up to {MOST_VALUES}")
        if self.head_dim > MOST_VALUES or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even and at most {MOST_VALUES}")

    def side(self, name: str) -> NuqSide:
        """The settings of "k" or "v"."""
        if name == "k":
            return NuqSide(self.k_bits, by_channel=True, ranged=not self.calibrated)
        return NuqSide(self.v_bits, by_channel=False, ranged=True)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then the planes of V."""
        return (*self._planes_of("k"), *self._planes_of("v"))

    def _planes_of(self, name: str) -> tuple[Plane, ...]:
        side = self.side(name)
        vectors = self.head_dim if side.by_channel else self.page_tokens
        return (
            *packed_planes(name, side.bits, self.page_tokens, self.head_dim, "_codes"),
            *((Plane(f"{name}_range", torch.float16, (2, vectors)),) if side.ranged else ()),
            Plane(f"{name}_at", torch.uint8, (OUTLIERS, vectors)),
            Plane(f"{name}_out", torch.float16, (OUTLIERS, vectors)),
            *(() if side.ranged else (Plane(f"{name}_first", torch.float32, (1,)),)),
        )


@dataclass(frozen=True, slots=True)
class NuqTables:
    """The tables of a layer from a calibration, float32."""

    k_poles: Tensor
    """[2^k_bits], ascending."""
    v_poles: Tensor
    """[2^v_bits], ascending."""
    k_range: Tensor
    """[2, heads, D]: lo and hi of all the model's KV heads."""
    frequencies: Tensor
    """[D/2]: how far channel pair (i, i + D/2) rotates from row to row, in radians."""

    def check(self, fmt: NuqFormat) -> None:
        """Raises `ValueError` naming the tensor that does not fit."""
        for name, poles, bits in (("k_poles", self.k_poles, fmt.k_bits), ("v_poles", self.v_poles, fmt.v_bits)):
            if poles.shape != (2**bits,) or not bool((poles.diff() >= 0).all()) or float(poles.abs().max()) > 1:
                raise ValueError(f"{name}: expected {2**bits} ascending numbers from -1 to 1")
        if self.k_range.dim() != 3 or self.k_range.shape[::2] != (2, fmt.head_dim):
            raise ValueError(f"k_range: shape {list(self.k_range.shape)}, expected [2, heads, {fmt.head_dim}]")
        if not bool((self.k_range.abs() <= LARGEST).all()) or not bool((self.k_range[0] <= self.k_range[1]).all()):
            raise ValueError("k_range: lo is above hi, or beyond FP16")
        if self.frequencies.shape != (fmt.head_dim // 2,):
            raise ValueError(f"frequencies: shape {list(self.frequencies.shape)}, expected [{fmt.head_dim // 2}]")

    def to(self, device: torch.device) -> NuqTables:
        """A copy on another device."""
        moved = (each.to(device) for each in (self.k_poles, self.v_poles, self.k_range, self.frequencies))
        return NuqTables(*moved)


class NuqKernels(PageKernels, Protocol):
    """`PageKernels` for a `NuqFormat`. Kernels of a calibrated format serve one layer each."""

    def calibrate(self, tables: NuqTables) -> None:
        """Take the layer's tables, before pages are sealed. Raises `ValueError`."""
        ...


@cache
def normal_poles(bits: int) -> tuple[float, ...]:
    """The 2^bits numbers from -1 to 1 with the least error for a cut normal distribution (Lloyd, Max), to 12 bits."""
    normal, count = NormalDist(), 2**bits
    poles = [CUT * (2 * i + 1 - count) / count for i in range(count)]
    for _ in range(500):
        bounds = [-CUT, *((a + b) / 2 for a, b in pairwise(poles)), CUT]
        poles = [
            (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
            for low, high in pairwise(bounds)
        ]
    return tuple(round(pole / CUT * 4096) / 4096 for pole in poles)


def cos_sin_of(rows: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., D/2] float32 of rows with these numbers [...], from angles in float64."""
    angles = rows.double()[..., None] * frequencies.double()
    return angles.cos().float(), angles.sin().float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows [..., D] float32 with the pairs (i, i + D/2) rotated by `cos` and `sin` [..., D/2]; -sin rotates back."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def unrotated(k: Tensor, starts: Tensor, frequencies: Tensor) -> Tensor:
    """K of pages [P, Hkv, Π, D] FP16, whose first rows have numbers `starts` [P], before the rotary embedding, FP16."""
    rows = starts[:, None] + torch.arange(k.shape[2], device=k.device)
    cos, sin = (each[:, None] for each in cos_sin_of(rows, frequencies))
    return rotated(k.float(), cos, -sin).clamp(-LARGEST, LARGEST).half()
