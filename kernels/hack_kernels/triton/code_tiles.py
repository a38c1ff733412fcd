"""The tiles in which a matrix of codes is stored: codes in the order in which a matrix unit takes them.

K is a matrix [Π tokens, D channels], V a matrix [D channels, Π tokens]: attention sums over columns
and keeps rows. A *tile* is 16 rows × 32 columns, the A operand of `mma.m16n8k32` for signed bytes. Stored tiles
have 512 bytes, and a byte holds one code of F = 8/bits code tiles, each in its own bit field:

    stored tile (j, t), field f = c·Fr + r   is   code tile (row j·Fr + r, column t·Fc + c)

with Fr = min(F, rows/16 as a power of two) and Fc = F/Fr. Code tiles past the matrix are empty: their codes are 0.
Within a stored tile, lane l of a warp owns bytes 16·l .. 16·l+15, and byte b of lane l is

    row l//4 + 8·(b//4 % 2), column 4·(l % 4) + b % 4 + 16·(b//8)

so one 16-byte load per lane is the operand, without a shuffle. One mask takes a field out: read as a signed byte, field
f has the value code·2^(bits·f). The top bit of every byte is stored flipped. So the last field has the value
code·2^(bits·(F-1)) - 128, which is linear too.

V's columns are tokens, and rest in *zipped* order: of 16 tokens, k and k + 8 lie side by side, at 2k and 2k + 1. A lane
of the product Q·K gets the scores of tokens k and k + 8, and the weights made of them must reach the lanes that hold
these columns of V. In zipped order one exchange between lanes takes 16 tokens there; in plain order it would take
shared memory and barriers.

Kernels take this description as a compile-time constant. Tensors in Triton have power-of-two sizes, so a size that
kernels need also comes as the next power of two, `_pad`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 32
TILE_BYTES: Final = TILE_ROWS * TILE_COLUMNS
TOP_BIT: Final = 0x80
CODE_BITS: Final = (2, 4)
"""Widths of codes of pages `hack`; tiles take every width that divides a byte."""


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """The stored tiles of one matrix of codes."""

    rows: int
    columns: int
    bits: int
    zipped: bool = False
    """Whether columns are in zipped order. If so, `columns` is a multiple of 16."""

    @property
    def fields(self) -> int:
        """F: codes per byte."""
        return 8 // self.bits

    @property
    def row_fields(self) -> int:
        """Fr: row tiles that share a stored tile."""
        return min(self.fields, padded(self.rows // TILE_ROWS))

    @property
    def column_fields(self) -> int:
        """Fc: column tiles that share a stored tile."""
        return self.fields // self.row_fields

    @property
    def column_tiles(self) -> int:
        """Code tiles across, the last of which may be filled in part."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def sharing(self) -> int:
        """Column tiles that share a stored tile, padded."""
        return min(self.column_fields, padded(self.column_tiles))

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def down(self) -> int:
        """Stored tiles below one another."""
        return -(-self.rows // (TILE_ROWS * self.row_fields))

    @property
    def across(self) -> int:
        """Stored tiles beside one another."""
        return -(-self.columns // (TILE_COLUMNS * self.column_fields))

    @property
    def stored(self) -> int:
        """Stored tiles in all."""
        return self.down * self.across

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tiles."""
        return self.stored * TILE_BYTES

    @property
    def down_pad(self) -> int:
        """`down`, padded."""
        return padded(self.down)

    @property
    def across_pad(self) -> int:
        """`across`, padded."""
        return padded(self.across)

    @property
    def field_rows(self) -> int:
        """Rows of one row field, padded."""
        return self.down_pad * TILE_ROWS

    @property
    def row_pad(self) -> int:
        """Rows of all fields, padded."""
        return self.field_rows * self.row_fields

    @property
    def exchange_words(self) -> int:
        """32-bit words of one field on the wire, padded like stored tiles. One part of a stored byte has as many."""
        return self.down_pad * self.across_pad * TILE_BYTES // 4 // self.fields

    def pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [..., rows, columns] -> bytes uint8 [..., nbytes]."""
        down, across = self.down, self.across
        padding = (
            across * self.column_fields * TILE_COLUMNS - self.columns,
            down * self.row_fields * TILE_ROWS - self.rows,
        )
        if self.zipped:
            codes = codes.unflatten(-1, (-1, 2, 8)).mT.flatten(-3)
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
        down, across = self.down, self.across
        plain = (packed ^ TOP_BIT).unflatten(-1, (down, across, 8, 4, 2, 2, 4))
        fields = torch.stack([(plain >> (self.bits * f)) & self.levels for f in range(self.fields)], dim=-8)
        ordered = fields.unflatten(-8, (self.column_fields, self.row_fields))
        split = ordered.movedim((-9, -8, -7, -6, -5, -4, -3, -2, -1), (-4, -8, -9, -5, -6, -2, -3, -7, -1))
        codes: Tensor = split.flatten(-5).flatten(-5, -2)[..., : self.rows, : self.columns]
        return (codes.unflatten(-1, (-1, 8, 2)).mT.flatten(-3) if self.zipped else codes).contiguous()
