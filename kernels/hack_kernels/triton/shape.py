"""What kernels know of a format at compile time: sizes, byte offsets and the tiling of codes, as one constant.

Tensors in Triton have power-of-two sizes, so every size of a matrix comes with the next power of two, `_pad`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hack_kernels.base import Arithmetic, HackFormat, OpenPage, Rounding
from hack_kernels.triton.layout import TILE_BYTES, TILE_COLUMNS, CodeTiles, page_layout


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class TileShape:
    """A matrix of codes as stored tiles; see `layout.py` for the letters."""

    rows: int
    columns: int
    bits: int
    levels: int
    fields: int
    row_fields: int
    column_fields: int
    down: int
    down_pad: int
    across: int
    across_pad: int
    field_rows: int
    """Rows of one row field, padded: down_pad · 16."""
    row_pad: int
    """Rows of all fields, padded: down_pad · 16 · row_fields."""
    exchange_words: int
    """32-bit words of one field on the wire, padded like stored tiles; as many as of one part of a stored byte."""

    @staticmethod
    def of(tiles: CodeTiles) -> TileShape:
        """From the layout's own description."""
        down, across = tiles.grid
        return TileShape(
            rows=tiles.rows,
            columns=tiles.columns,
            bits=tiles.bits,
            levels=2**tiles.bits - 1,
            fields=tiles.fields,
            row_fields=tiles.row_fields,
            column_fields=tiles.column_fields,
            down=down,
            down_pad=padded(down),
            across=across,
            across_pad=padded(across),
            field_rows=padded(down) * 16,
            row_pad=padded(down) * 16 * tiles.row_fields,
            exchange_words=padded(down) * padded(across) * TILE_BYTES // 4 // tiles.fields,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """One format. It leaves out what kernels take as numbers (the seed), so that it names a compiled kernel."""

    page_tokens: int
    head_dim: int
    root: float
    """sqrt(head_dim), by which scores are divided."""
    groups: int
    partition: int
    partition_pad: int
    partition_tiles: int
    """Column tiles of a K partition."""
    k: TileShape
    v: TileShape
    record: int
    k_meta: int
    v_codes: int
    v_meta: int
    k_sums: int
    v_sums: int
    k_wide_sums: bool
    v_wide_sums: bool
    sums: bool
    """Records hold sums."""
    asymmetric: bool
    stochastic: bool
    own_codes: bool
    """A query sees K of its own page as codes."""


@lru_cache(maxsize=64)
def shape_of(fmt: HackFormat) -> Shape:
    """The compile-time constants of a format."""
    layout = page_layout(fmt)
    return Shape(
        page_tokens=fmt.page_tokens,
        head_dim=fmt.head_dim,
        root=math.sqrt(fmt.head_dim),
        groups=fmt.k_groups,
        partition=fmt.k_partition,
        partition_pad=padded(fmt.k_partition),
        partition_tiles=fmt.k_partition // TILE_COLUMNS,
        k=TileShape.of(layout.k_tiles),
        v=TileShape.of(layout.v_tiles),
        record=layout.nbytes,
        k_meta=layout.k_meta,
        v_codes=layout.v_codes,
        v_meta=layout.v_meta,
        k_sums=layout.k_sums,
        v_sums=layout.v_sums,
        k_wide_sums=layout.k_sum_dtype.itemsize == 2,
        v_wide_sums=layout.v_sum_dtype.itemsize == 2,
        sums=fmt.sums,
        asymmetric=fmt.arithmetic is Arithmetic.ASYMMETRIC,
        stochastic=fmt.rounding is Rounding.STOCHASTIC,
        own_codes=fmt.open_page is OpenPage.K_CODES,
    )
