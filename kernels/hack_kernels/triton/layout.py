"""How a page rests in GPU memory: codes in the order in which a matrix unit takes them, one record per page.

A *record* holds everything of one page of one KV head, contiguously: k_codes, k_meta, v_codes, v_meta, then k_sums and
v_sums where the format has them; its size is a multiple of 128 bytes. The planes of a pool are views into its records.

**Codes** are stored tiles of 512 bytes, as in `code_tiles.py`: a lane's 16-byte load is the operand.

**Metadata.** A *unit* is 16 rows, each with a scale and a minimum. Units of K are (partition, token tile), in this
order; a unit of V is a channel tile. Two neighbouring units rest together as FP16 [8 rows l//4][2 units][2 row
halves][scale, minimum], 16 bytes for the rows of a lane. Sums rest likewise without the last axis, in the wire's type.

`PageLayout` is the only description of this order. The host computes strides and offsets from it, and every kernel
takes it as a compile-time constant. `tiles.py` has the device functions that follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes
from hack_kernels.hack_format import Arithmetic, HackFormat, OpenPage, Rounding, sum_dtype
from hack_kernels.quantize import pack, unpack
from hack_kernels.triton.code_tiles import TILE_COLUMNS, TILE_ROWS, TOP_BIT, CodeTiles, padded

RECORD_ALIGNMENT: Final = 128


def aligned(end: int) -> int:
    """Bytes of a record whose last plane ends at `end`."""
    return -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


class RecordLayout(Protocol):
    """The host's view of the record of one page of one KV head."""

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""

    @property
    def offsets(self) -> dict[str, int]:
        """Where in a record each plane begins; the first is at 0."""


def new_planar_pages(
    fmt: PageFormat, layout: RecordLayout, num_pages: int, num_kv_heads: int, device: torch.device
) -> Planes:
    """Planes as views of zeroed records, where planes rest in wire order, one after another."""
    records, planes = torch.zeros((num_pages, num_kv_heads, layout.nbytes), dtype=torch.uint8, device=device), Planes()
    for plane in fmt.planes:
        begin = layout.offsets[plane.name]
        part = records[..., begin : begin + plane.page_bytes].view(plane.dtype)
        planes[plane.name] = part.unflatten(-1, plane.shape)
    return planes


class TiledLayout(RecordLayout, Protocol):
    """A record whose codes rest in tiles."""

    def pages(self, records: Tensor) -> Planes:
        """Planes as views into records uint8 [N, Hkv, nbytes]. Only planes of codes have three axes."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The record of one page of one KV head: sizes, byte offsets of the planes, and the format's compile-time settings.

    Kernels are compiled once per layout, so it has no seed: kernels take the seed as an argument.
    """

    page_tokens: int
    head_dim: int
    root: float
    """sqrt(D), by which scores are divided."""
    groups: int
    """Partitions of a row of K."""
    partition: int
    """Channels of a partition of K."""
    partition_pad: int
    partition_tiles: int
    """Code tiles across a partition of K."""
    k_tiles: CodeTiles
    """Tokens × channels."""
    v_tiles: CodeTiles
    """Channels × tokens."""
    k_sum_dtype: torch.dtype
    v_sum_dtype: torch.dtype
    sums: bool
    """Whether records hold sums."""
    asymmetric: bool
    """Whether Q and P have minima."""
    stochastic: bool
    """Whether codes are rounded with noise."""
    own_codes: bool
    """Whether a query sees K of its own page as codes."""

    @property
    def k_units(self) -> int:
        """Metadata units of K: partitions × token tiles."""
        return self.groups * self.page_tokens // TILE_ROWS

    @property
    def v_units(self) -> int:
        """Metadata units of V: channel tiles."""
        return self.head_dim // TILE_ROWS

    @property
    def k_codes(self) -> int:
        """Offset of K's codes; a record begins with them."""
        return 0

    @property
    def k_meta(self) -> int:
        """Offset of K's scales and minima."""
        return self.k_tiles.nbytes

    @property
    def v_codes(self) -> int:
        """Offset of V's codes."""
        return self.k_meta + self.k_units * TILE_ROWS * 4

    @property
    def v_meta(self) -> int:
        """Offset of V's scales and minima."""
        return self.v_codes + self.v_tiles.nbytes

    @property
    def k_sums(self) -> int:
        """Offset of K's sums, or of the end without them."""
        return self.v_meta + self.v_units * TILE_ROWS * 4

    @property
    def v_sums(self) -> int:
        """Offset of V's sums, or of the end without them."""
        return self.k_sums + self.sums * self.k_units * TILE_ROWS * self.k_sum_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return aligned(self.v_sums + self.sums * self.v_units * TILE_ROWS * self.v_sum_dtype.itemsize)

    @property
    def offsets(self) -> dict[str, int]:
        """See `RecordLayout`."""
        found = {"k_codes": 0, "k_min": self.k_meta + 2, "k_scale": self.k_meta}
        found |= {"v_codes": self.v_codes, "v_min": self.v_meta + 2, "v_scale": self.v_meta}
        return found | ({"k_sums": self.k_sums, "v_sums": self.v_sums} if self.sums else {})

    @property
    def wide_k_sums(self) -> bool:
        """Whether K's sums need 16 bits."""
        return self.k_sum_dtype is torch.int16

    @property
    def wide_v_sums(self) -> bool:
        """Whether V's sums need 16 bits."""
        return self.v_sum_dtype is torch.int16

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record of a page to the next head's."""
        return self.nbytes

    def pages(self, records: Tensor) -> Planes:
        """Planes as views into records uint8 [N, Hkv, nbytes]: codes [N, Hkv, bytes], others [N, Hkv, U/2, 8, 2, 2]."""

        def metadata(begin: int, units: int) -> Tensor:
            plane = records[..., begin : begin + units * TILE_ROWS * 4].view(torch.float16)
            return plane.view(*plane.shape[:2], units // 2, 8, 2, 2, 2)

        k_meta, v_meta = metadata(self.k_meta, self.k_units), metadata(self.v_meta, self.v_units)
        planes = {
            "k_codes": records[..., : self.k_meta],
            "k_min": k_meta[..., 1],
            "k_scale": k_meta[..., 0],
            "v_codes": records[..., self.v_codes : self.v_meta],
            "v_min": v_meta[..., 1],
            "v_scale": v_meta[..., 0],
        }
        if self.sums:
            planes["k_sums"] = unit_plane(records, self.k_sums, self.k_units, self.k_sum_dtype)
            planes["v_sums"] = unit_plane(records, self.v_sums, self.v_units, self.v_sum_dtype)
        return planes


@lru_cache(maxsize=64)
def page_layout(fmt: HackFormat) -> PageLayout:
    """The layout of a format's pages, the same for every seed."""
    return PageLayout(
        page_tokens=fmt.page_tokens,
        head_dim=fmt.head_dim,
        root=math.sqrt(fmt.head_dim),
        groups=fmt.k_groups,
        partition=fmt.k_partition,
        partition_pad=padded(fmt.k_partition),
        partition_tiles=fmt.k_partition // TILE_COLUMNS,
        k_tiles=CodeTiles(fmt.page_tokens, fmt.head_dim, fmt.k_bits),
        v_tiles=CodeTiles(fmt.head_dim, fmt.page_tokens, fmt.v_bits, zipped=True),
        k_sum_dtype=sum_dtype(fmt.k_bits, fmt.k_partition),
        v_sum_dtype=sum_dtype(fmt.v_bits, fmt.page_tokens),
        sums=fmt.sums,
        asymmetric=fmt.arithmetic is Arithmetic.ASYMMETRIC,
        stochastic=fmt.rounding is Rounding.STOCHASTIC,
        own_codes=fmt.open_page is OpenPage.K_CODES,
    )


def unit_plane(records: Tensor, begin: int, units: int, dtype: torch.dtype) -> Tensor:
    """A number for each row of `units` units from byte `begin` of records on: [N, Hkv, U/2, 8, 2, 2]."""
    plane = records[..., begin : begin + units * TILE_ROWS * dtype.itemsize].view(dtype)
    return plane.view(*plane.shape[:2], units // 2, 8, 2, 2)


def new_pages(fmt: HackFormat, num_pages: int, num_kv_heads: int, device: torch.device | str) -> Planes:
    """A pool for one layer whose codes, sums, scales and minima are all zero."""
    return new_records(page_layout(fmt), num_pages, num_kv_heads, device)


def new_records(layout: TiledLayout, num_pages: int, num_kv_heads: int, device: torch.device | str) -> Planes:
    """Planes of records in which everything is zero."""
    pages = layout.pages(torch.zeros((num_pages, num_kv_heads, layout.nbytes), dtype=torch.uint8, device=device))
    for plane in pages.values():
        if plane.dim() == 3:
            plane.fill_(TOP_BIT)
    return pages


def check_records(fmt: HackFormat, pages: Planes) -> None:
    """`check_layout` of a format's pages."""
    check_layout(page_layout(fmt), pages)


def check_layout(layout: RecordLayout, pages: Planes) -> None:
    """Raise `ValueError` unless `pages` are views into one pool's records (a whole pool or some of its KV heads):
    kernels compute the address of every plane from the first plane."""
    begin = next(iter(layout.offsets))
    codes = pages[begin]
    if codes.stride(-1) != 1 or (codes.shape[1] > 1 and codes.stride(1) != layout.nbytes):
        raise ValueError(f"{begin} has strides {codes.stride()}; pages must be views into records of {layout.nbytes} B")
    for name, offset in layout.offsets.items():
        plane = pages[name]
        same_pool = plane.shape[:2] == codes.shape[:2] and plane.data_ptr() == codes.data_ptr() + offset
        of_one_page = plane.shape[0] == 1  # the stride of a single page means nothing
        same_stride = of_one_page or plane.stride(0) * plane.itemsize == codes.stride(0)
        if not same_pool or not same_stride:
            raise ValueError(f"plane {name} does not lie {offset} B into the records of {begin}")


def from_wire(fmt: HackFormat, planes: Planes) -> Planes:
    """Planes in wire order [..., *plane shape] -> resting order. The definition of what `install` and `seal` write."""
    layout = page_layout(fmt)
    resting = {
        "k_codes": layout.k_tiles.pack(unpack(planes["k_codes"], fmt.k_bits, axis=-2)),
        "v_codes": layout.v_tiles.pack(unpack(planes["v_codes"], fmt.v_bits, axis=-1)),
    }
    for name in planes.keys() - resting.keys():
        resting[name] = in_units(planes[name].transpose(-1, -2).flatten(-2) if name.startswith("k_") else planes[name])
    return {name: resting[name] for name in planes}


def to_wire(fmt: HackFormat, pages: Planes) -> Planes:
    """Inverse of `from_wire`."""
    layout = page_layout(fmt)
    wire = {
        "k_codes": pack(layout.k_tiles.unpack(pages["k_codes"]), fmt.k_bits, axis=-2),
        "v_codes": pack(layout.v_tiles.unpack(pages["v_codes"]), fmt.v_bits, axis=-1),
    }
    for name in pages.keys() - wire.keys():
        rows = out_of_units(pages[name])
        if name.startswith("k_"):
            rows = rows.unflatten(-1, (fmt.k_groups, fmt.page_tokens)).transpose(-1, -2)
        wire[name] = rows.contiguous()
    return {name: wire[name] for name in pages}


def in_units(rows: Tensor) -> Tensor:
    """A number for each row [..., R] in the order of units, [..., R/32, 8, 2, 2]."""
    units: Tensor = rows.unflatten(-1, (-1, 2, 2, 8)).movedim(-1, -3)
    return units.contiguous()


def out_of_units(units: Tensor) -> Tensor:
    """Inverse of `in_units`."""
    return units.movedim(-3, -1).flatten(-4)
