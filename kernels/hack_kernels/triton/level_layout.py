"""How a page of levels rests in GPU memory: one record, as in `layout.py`, with scales by token for K and V.

A record holds k_codes, k_high where codes have 3 bits, k_scale, v_codes, v_high, v_scale. Codes are stored tiles of
`code_tiles.py`. Codes of 3 bits have tiles of the lower two bits and tiles of the highest, and take two products that
are added in integers. Scales are FP16 or bytes in units of 16 tokens, two units together as [8 rows l//4][2 units][2
row halves].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.level_format import STEP, STRETCH, LevelFormat, Scales, code_planes
from hack_kernels.quantize import pack, unpack
from hack_kernels.triton.code_tiles import TILE_ROWS, CodeTiles
from hack_kernels.triton.layout import aligned, in_units, new_records, out_of_units, unit_plane


@dataclass(frozen=True, slots=True)
class LevelSide:
    """K [Π tokens, D channels] or V [D channels, Π tokens] of a page, from byte `codes` of its record on."""

    codes: int
    low: CodeTiles
    """Codes, or their lower two bits."""
    top: CodeTiles
    """Highest bits of codes of 3 bits."""
    split: bool
    """Whether codes have 3 bits."""
    tokens: int
    narrow: bool
    """Whether scales are bytes."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 3 if self.split else self.low.bits

    @property
    def zero(self) -> float:
        """z: a code stands for the level code - z."""
        return ((1 << self.bits) - 1) / 2

    @property
    def step(self) -> float:
        """See `STEP`."""
        return STEP[self.bits]

    @property
    def stretch(self) -> float:
        """See `STRETCH`."""
        return STRETCH[self.bits]

    @property
    def high(self) -> int:
        """Offset of the highest bits."""
        return self.codes + self.low.nbytes

    @property
    def scale(self) -> int:
        """Offset of the scales."""
        return self.high + self.split * self.top.nbytes

    @property
    def end(self) -> int:
        """Offset behind the scales."""
        return self.scale + self.scale_dtype.itemsize * self.tokens

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type in which a scale rests."""
        return torch.uint8 if self.narrow else torch.float16


@dataclass(frozen=True, slots=True)
class LevelLayout:
    """The record of one page of one KV head; the compile-time constant of all kernels on pages of levels."""

    page_tokens: int
    head_dim: int
    root: float
    """sqrt(D), by which scores are divided."""
    k: LevelSide
    v: LevelSide

    groups = 1
    """A query has one scale, as a row of K has."""
    asymmetric = False
    own_codes = False

    @property
    def partition(self) -> int:
        """Channels that share a scale."""
        return self.head_dim

    @property
    def v_tiles(self) -> CodeTiles:
        """The tiles by which prefill divides V's channels."""
        return self.v.low

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return aligned(self.v.end)

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record of a page to the next head's."""
        return self.nbytes

    @property
    def offsets(self) -> dict[str, int]:
        """See `RecordLayout`."""
        found = dict[str, int]()
        for name, side in (("k", self.k), ("v", self.v)):
            found[f"{name}_codes"] = side.codes
            if side.split:
                found[f"{name}_high"] = side.high
            found[f"{name}_scale"] = side.scale
        return found

    def pages(self, records: Tensor) -> Planes:
        """Planes as views into records uint8 [N, Hkv, nbytes]: codes [N, Hkv, bytes], others as `unit_plane`."""
        planes = Planes()
        for name, side in (("k", self.k), ("v", self.v)):
            planes[f"{name}_codes"] = records[..., side.codes : side.high]
            if side.split:
                planes[f"{name}_high"] = records[..., side.high : side.scale]
            planes[f"{name}_scale"] = unit_plane(records, side.scale, self.page_tokens // TILE_ROWS, side.scale_dtype)
        return planes


def _side(codes: int, rows: int, columns: int, bits: int, fmt: LevelFormat, *, zipped: bool) -> LevelSide:
    low = CodeTiles(rows, columns, 2 if bits == 3 else bits, zipped)
    top = CodeTiles(rows, columns, 1, zipped)
    return LevelSide(codes, low, top, bits == 3, fmt.page_tokens, fmt.scales is Scales.FP8)


@lru_cache(maxsize=64)
def level_layout(fmt: LevelFormat) -> LevelLayout:
    """The layout of a format's pages."""
    pi, d = fmt.page_tokens, fmt.head_dim
    k = _side(0, pi, d, fmt.k_bits, fmt, zipped=False)
    return LevelLayout(pi, d, math.sqrt(d), k, _side(k.end, d, pi, fmt.v_bits, fmt, zipped=True))


def new_level_pages(fmt: LevelFormat, num_pages: int, num_kv_heads: int, device: torch.device | str) -> Planes:
    """A pool for one layer whose codes and scales are all zero."""
    return new_records(level_layout(fmt), num_pages, num_kv_heads, device)


def levels_from_wire(fmt: LevelFormat, planes: Planes) -> Planes:
    """Planes in wire order [..., *plane shape] -> resting order. The definition of what `install` and `seal` write."""
    resting = Planes()
    for name, tiles, bits, axis in _coded(fmt):
        resting[name] = tiles.pack(unpack(planes[name], bits, axis))
    return {name: resting[name] if name in resting else in_units(plane) for name, plane in planes.items()}


def levels_to_wire(fmt: LevelFormat, pages: Planes) -> Planes:
    """Inverse of `levels_from_wire`."""
    wire = Planes()
    for name, tiles, bits, axis in _coded(fmt):
        wire[name] = pack(tiles.unpack(pages[name]), bits, axis)
    return {name: wire[name] if name in wire else out_of_units(plane).contiguous() for name, plane in pages.items()}


def _coded(fmt: LevelFormat) -> list[tuple[str, CodeTiles, int, int]]:
    """Planes of codes: name, tiles, bits, and the axis along which the wire packs them."""
    layout, found = level_layout(fmt), list[tuple[str, CodeTiles, int, int]]()
    for side, bits, name, axis in ((layout.k, fmt.k_bits, "k", -2), (layout.v, fmt.v_bits, "v", -1)):
        for (plane, width), tiles in zip(code_planes(name, bits), (side.low, side.top), strict=False):
            found.append((plane, tiles, width, axis))
    return found
