"""How a page rests in GPU memory: codes in the order in which a matrix unit takes them, one record per page.

A *record* holds everything of one page of one KV head, contiguously: k_codes, k_meta, v_codes, v_meta, then k_sums and
v_sums where the format has them; its size is a multiple of 128 bytes. The planes of a pool are views into its records.

**Codes.** K is a matrix [Π tokens, D channels], V a matrix [D channels, Π tokens]: rows are what attention keeps,
columns what it sums over. A *tile* is 16 rows × 32 columns, the A operand of `mma.m16n8k32` for signed bytes. Stored
tiles have 512 bytes, and a byte holds one code of F = 8/bits code tiles, each in its own bit field:

    stored tile (j, t), field f = c·Fr + r   is   code tile (row j·Fr + r, column t·Fc + c)

with Fr = min(F, rows/16) and Fc = F/Fr. Code tiles past the matrix are empty: their codes are 0. Within a stored tile,
lane l of a warp owns bytes 16·l .. 16·l+15, and byte b of lane l is

    row l//4 + 8·(b//4 % 2), column 4·(l % 4) + b % 4 + 16·(b//8)

so one 16-byte load per lane is the operand, without a shuffle. A field is taken out by a mask alone: read as a signed
byte, field f is worth code·2^(bits·f). The top bit of every byte is stored flipped, which makes the last field
code·2^(bits·(F-1)) - 128 and so linear too.

**Metadata.** A *unit* is 16 rows with a scale and a minimum each: of K, (partition, token tile) in this order, of V a
channel tile. Two neighbouring units rest together as FP16 [8 rows l//4][2 units][2 row halves][scale, minimum], 16
bytes for the rows of a lane; sums likewise without the last axis, in the wire's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Arithmetic, HackFormat, HackPages, sum_dtype
from hack_kernels.quantize import pack, unpack

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 32
TILE_BYTES: Final = TILE_ROWS * TILE_COLUMNS
RECORD_ALIGNMENT: Final = 128
TOP_BIT: Final = 0x80


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """The stored tiles of one matrix of codes."""

    rows: int
    columns: int
    bits: int

    @property
    def fields(self) -> int:
        """F: codes per byte."""
        return 8 // self.bits

    @property
    def row_fields(self) -> int:
        """Fr: row tiles that share a stored tile."""
        return min(self.fields, self.rows // TILE_ROWS)

    @property
    def column_fields(self) -> int:
        """Fc: column tiles that share a stored tile."""
        return self.fields // self.row_fields

    @property
    def grid(self) -> tuple[int, int]:
        """Stored tiles (down, across)."""
        down = -(-self.rows // (TILE_ROWS * self.row_fields))
        return down, -(-self.columns // (TILE_COLUMNS * self.column_fields))

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tiles."""
        down, across = self.grid
        return down * across * TILE_BYTES

    def pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [..., rows, columns] -> bytes uint8 [..., nbytes]."""
        down, across = self.grid
        padding = (
            across * self.column_fields * TILE_COLUMNS - self.columns,
            down * self.row_fields * TILE_ROWS - self.rows,
        )
        codes = torch.nn.functional.pad(codes, (0, padding[0], 0, padding[1]))
        split = codes.unflatten(-1, (across, self.column_fields, 2, 4, 4)).unflatten(-6, (down, self.row_fields, 2, 8))
        # down, row field, row half, row, across, column field, column half, quad, byte
        ordered = split.movedim((-4, -8, -9, -5, -6, -2, -3, -7, -1), (-9, -8, -7, -6, -5, -4, -3, -2, -1))
        fields = ordered.flatten(-9, -8)
        packed = torch.zeros_like(fields.select(-8, 0))
        for f in range(self.fields):
            packed |= fields.select(-8, f) << (self.bits * f)
        return (packed ^ TOP_BIT).flatten(-7)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`."""
        down, across = self.grid
        plain = (packed ^ TOP_BIT).unflatten(-1, (down, across, 8, 4, 2, 2, 4))
        mask = 2**self.bits - 1
        fields = torch.stack([(plain >> (self.bits * f)) & mask for f in range(self.fields)], dim=-8)
        ordered = fields.unflatten(-8, (self.column_fields, self.row_fields))
        split = ordered.movedim((-9, -8, -7, -6, -5, -4, -3, -2, -1), (-4, -8, -9, -5, -6, -2, -3, -7, -1))
        codes: Tensor = split.flatten(-5).flatten(-5, -2)
        return codes[..., : self.rows, : self.columns].contiguous()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte offsets of the planes in the record of one page of one KV head."""

    fmt: HackFormat

    @property
    def k_tiles(self) -> CodeTiles:
        """K: tokens × channels."""
        return CodeTiles(self.fmt.page_tokens, self.fmt.head_dim, self.fmt.k_bits)

    @property
    def v_tiles(self) -> CodeTiles:
        """V: channels × tokens."""
        return CodeTiles(self.fmt.head_dim, self.fmt.page_tokens, self.fmt.v_bits)

    @property
    def k_units(self) -> int:
        """Metadata units of K: partitions × token tiles."""
        return self.fmt.k_groups * self.fmt.page_tokens // TILE_ROWS

    @property
    def v_units(self) -> int:
        """Metadata units of V: channel tiles."""
        return self.fmt.head_dim // TILE_ROWS

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
        return self.k_sums + self.fmt.sums * self.k_units * TILE_ROWS * self.k_sum_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        end = self.v_sums + self.fmt.sums * self.v_units * TILE_ROWS * self.v_sum_dtype.itemsize
        return -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    @property
    def k_sum_dtype(self) -> torch.dtype:
        """Type of K's sums."""
        return sum_dtype(self.fmt.k_bits, self.fmt.k_partition)

    @property
    def v_sum_dtype(self) -> torch.dtype:
        """Type of V's sums."""
        return sum_dtype(self.fmt.v_bits, self.fmt.page_tokens)

    @property
    def wide_k_sums(self) -> bool:
        """Whether K's sums need 16 bits."""
        return self.k_sum_dtype is torch.int16

    @property
    def wide_v_sums(self) -> bool:
        """Whether V's sums need 16 bits."""
        return self.v_sum_dtype is torch.int16

    @property
    def asymmetric(self) -> bool:
        """Whether Q and P have minima."""
        return self.fmt.arithmetic is Arithmetic.ASYMMETRIC

    def pages(self, records: Tensor) -> HackPages:
        """Planes as views into records uint8 [N, Hkv, nbytes]: codes [N, Hkv, bytes], others [N, Hkv, U/2, 8, 2, 2]."""

        def metadata(begin: int, units: int) -> Tensor:
            plane = records[..., begin : begin + units * TILE_ROWS * 4].view(torch.float16)
            return plane.view(*plane.shape[:2], units // 2, 8, 2, 2, 2)

        def sums(begin: int, units: int, dtype: torch.dtype) -> Tensor:
            plane = records[..., begin : begin + units * TILE_ROWS * dtype.itemsize].view(dtype)
            return plane.view(*plane.shape[:2], units // 2, 8, 2, 2)

        k_meta, v_meta = metadata(self.k_meta, self.k_units), metadata(self.v_meta, self.v_units)
        planes = {
            "k_codes": records[..., : self.k_meta],
            "k_min": k_meta[..., 1],
            "k_scale": k_meta[..., 0],
            "v_codes": records[..., self.v_codes : self.v_meta],
            "v_min": v_meta[..., 1],
            "v_scale": v_meta[..., 0],
        }
        if self.fmt.sums:
            planes["k_sums"] = sums(self.k_sums, self.k_units, self.k_sum_dtype)
            planes["v_sums"] = sums(self.v_sums, self.v_units, self.v_sum_dtype)
        return planes


@lru_cache(maxsize=64)
def page_layout(fmt: HackFormat) -> PageLayout:
    """The layout of a format's pages."""
    return PageLayout(fmt)


def new_pages(fmt: HackFormat, num_pages: int, num_kv_heads: int, device: torch.device | str) -> HackPages:
    """A pool for one layer whose codes, sums, scales and minima are all zero."""
    layout = page_layout(fmt)
    records = torch.zeros((num_pages, num_kv_heads, layout.nbytes), dtype=torch.uint8, device=device)
    pages = layout.pages(records)
    pages["k_codes"].fill_(TOP_BIT)
    pages["v_codes"].fill_(TOP_BIT)
    return pages


def check_records(fmt: HackFormat, pages: HackPages) -> None:
    """Kernels reach every plane from the first one: raise `ValueError` unless `pages` are views into one pool's records
    (a whole pool or some of its KV heads)."""
    layout = page_layout(fmt)
    codes = pages["k_codes"]
    if codes.stride(2) != 1 or codes.stride(1) != layout.nbytes:
        raise ValueError(f"k_codes has strides {codes.stride()}; pages must be views into records of {layout.nbytes} B")
    offsets = {"k_min": layout.k_meta + 2, "k_scale": layout.k_meta, "v_codes": layout.v_codes}
    offsets |= {"v_min": layout.v_meta + 2, "v_scale": layout.v_meta}
    if fmt.sums:
        offsets |= {"k_sums": layout.k_sums, "v_sums": layout.v_sums}
    for name, offset in offsets.items():
        plane = pages[name]
        same_pool = plane.shape[:2] == codes.shape[:2] and plane.data_ptr() == codes.data_ptr() + offset
        same_stride = plane.shape[0] == 1 or plane.stride(0) * plane.itemsize == codes.stride(
            0
        )  # of one page it says nothing
        if not same_pool or not same_stride:
            raise ValueError(f"plane {name} does not lie {offset} B into the records of k_codes")


def from_wire(fmt: HackFormat, planes: HackPages) -> HackPages:
    """Planes in wire order [..., *plane shape] -> resting order. The definition of what `install` and `seal` write."""
    layout = page_layout(fmt)
    resting = {
        "k_codes": layout.k_tiles.pack(unpack(planes["k_codes"], fmt.k_bits, axis=-2)),
        "v_codes": layout.v_tiles.pack(unpack(planes["v_codes"], fmt.v_bits, axis=-1)),
    }
    for name in planes.keys() - resting.keys():
        rows = planes[name].transpose(-1, -2).flatten(-2) if name.startswith("k_") else planes[name]
        resting[name] = rows.unflatten(-1, (-1, 2, 2, 8)).movedim(-1, -3).contiguous()
    return {name: resting[name] for name in planes}


def to_wire(fmt: HackFormat, pages: HackPages) -> HackPages:
    """Inverse of `from_wire`."""
    layout = page_layout(fmt)
    wire = {
        "k_codes": pack(layout.k_tiles.unpack(pages["k_codes"]), fmt.k_bits, axis=-2),
        "v_codes": pack(layout.v_tiles.unpack(pages["v_codes"]), fmt.v_bits, axis=-1),
    }
    for name in pages.keys() - wire.keys():
        rows = pages[name].movedim(-3, -1).flatten(-4)
        if name.startswith("k_"):
            rows = rows.unflatten(-1, (fmt.k_groups, fmt.page_tokens)).transpose(-1, -2)
        wire[name] = rows.contiguous()
    return {name: wire[name] for name in pages}
