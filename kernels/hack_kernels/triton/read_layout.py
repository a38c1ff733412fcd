"""How a page rests in GPU memory whose planes keep their wire order and whose kernels load every code by its place.

A *record* holds one page of one KV head: its planes one after another, planes of bytes first. So the planes of a pool
are views, and pages travel as they rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from hack_kernels.base import Plane
from hack_kernels.read_format import LOW_BITS
from hack_kernels.triton.float_layout import SIDE_ALIGNMENT
from hack_kernels.triton.layout import aligned

STEP: Final = 16
"""As few channels as a product takes: with more, kernels spill."""
LARGEST = tl.constexpr(65504.0)
"""The largest FP16 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLayout:
    """The record of one page of one KV head. Kernels are compiled once per layout."""

    head_dim: int
    page_tokens: int
    places: tuple[tuple[str, int], ...]
    """Each plane and where it begins in a record."""
    nbytes: int
    """Bytes of a record."""
    step: int
    """Channels of K that decode multiplies at once. A kernel knows a layout by its fields, so this is one."""
    dtype: tl.dtype = tl.float16
    """The type that queries, keys and weights are rounded to in decode."""

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record of a page to the next head's."""
        return self.nbytes

    @property
    def offsets(self) -> dict[str, int]:
        """See `RecordLayout`."""
        return dict(self.places)


def one_after_another(planes: Sequence[Plane]) -> tuple[tuple[tuple[str, int], ...], int]:
    """Where each plane begins in a record, and the bytes of a record."""
    places, end = list[tuple[str, int]](), 0
    for plane in sorted(planes, key=lambda plane: plane.dtype.itemsize):
        begin = -(-end // SIDE_ALIGNMENT) * SIDE_ALIGNMENT
        places.append((plane.name, begin))
        end = begin + plane.page_bytes
    return tuple(places), aligned(end)


@dataclass(frozen=True, slots=True)
class CodePlanes:
    """Codes that are packed along rows (`read_format.py`)."""

    codes: int
    """Offset in the record of the lower bits of codes."""
    high: int
    """Offset in the record of the highest bit of codes of 3 or 5 bits."""
    bits: int

    @property
    def low_bits(self) -> int:
        """Bits of a code in the first plane."""
        return LOW_BITS.get(self.bits, self.bits)


def code_planes(name: str, bits: int, places: dict[str, int]) -> CodePlanes:
    """The codes of "k" or "v"."""
    return CodePlanes(places[f"{name}_codes"], places.get(f"{name}_high", 0), bits)


@triton.jit
def bytes_at(plane, row, channel, D: tl.constexpr):
    """Bytes INT32 [W, rows, channels] of a plane [rows, D] that begins at `plane` [W]."""
    return tl.load(plane[:, None, None] + (row[:, None] * D + channel[None, :])[None, :, :]).to(tl.int32)


@triton.jit
def packed_codes(record, row, channel, PLANES: tl.constexpr, D: tl.constexpr):
    """Codes INT32 [W, rows, channels] of pages at `record` [W]."""
    LOW: tl.constexpr = PLANES.low_bits
    TOGETHER: tl.constexpr = 8 // LOW
    low = bytes_at(record + PLANES.codes, row // TOGETHER, channel, D)
    codes = low >> (row % TOGETHER * LOW)[None, :, None] & ((1 << LOW) - 1)
    if PLANES.bits > LOW:
        high = bytes_at(record + PLANES.high, row // 8, channel, D)
        codes |= (high >> (row % 8)[None, :, None] & 1) << LOW
    return codes


@triton.jit
def halves(record, offset, place):
    """FP16 numbers of pages at `record` [W], as FP32 [W, places]."""
    plane = (record + offset).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(plane[:, None] + place[None, :]).to(tl.float32)


@triton.jit
def rounded_half(x):
    """FP32 to FP16; beyond its range, the largest number."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16)
