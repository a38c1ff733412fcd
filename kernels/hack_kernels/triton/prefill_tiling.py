"""The share of work of a prefill program: its number of query rows, and its blocks of V's channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.code_tiles import TILE_BYTES
from hack_kernels.triton.layout import page_layout

QUERY_ROWS: Final = 32
"""Query rows of a program; half as many for wide heads, for float32 and for two warps. On Hopper, 64 rows and its wider
INT8 products would take a fifth fewer instructions, but 64 rows spill on other GPUs."""
TILES_AT_ONCE: Final = 4
"""Tiles of 16 channels of V multiplied at once: with fewer, warps would have no products of their own and repeat
some."""
PARTS: Final = 2
"""Parts that V's channels are divided into where registers do not suffice for all of them."""
LANE_BYTES: Final = 16
"""Bytes of codes that a lane loads at a time. Pages of 32 tokens have too few codes for more than two warps."""

OWN_ROWS: Final = 32
"""Rows of the own page that are read at a time: FP16 rows need more shared memory than codes."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The share of work of one program."""

    rows: int
    """Query rows, heads padded."""
    warps: int
    v_fields: int
    v_down: int
    """A block of V, multiplied at once: `v_fields` bit fields of `v_down` rows of stored tiles."""
    blocks: int
    """Blocks of V that one program computes."""
    parts: int
    """Programs that divide V's channels among them; each multiplies all of K."""
    own_rows: int
    """Rows of the own page that are read at a time."""

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.v_down * self.v_fields * 16


def tiling_of(fmt: HackFormat, dtype: torch.dtype) -> Tiling:
    """A tiling that does not spill on any GPU."""
    v = page_layout(fmt).v_tiles
    half = fmt.head_dim > 128 or fmt.page_tokens == 32 or dtype is torch.float32
    # Eight partitions of K, with constants for every row, leave two warps no registers for outputs of all channels.
    divided_v = fmt.page_tokens == 32 and fmt.head_dim > 128
    warps = 4 if fmt.page_tokens > 32 else 2
    down = min(v.down_pad, TILES_AT_ONCE)
    for_lanes = warps * 32 * LANE_BYTES // (down * v.across * TILE_BYTES)
    fields = min(v.row_fields, max(1, for_lanes, TILES_AT_ONCE // down))
    blocks = v.row_pad // (fields * down * 16)
    parts = PARTS if divided_v else 1
    return Tiling(
        rows=QUERY_ROWS // 2 if half else QUERY_ROWS,
        warps=warps,
        v_fields=fields,
        v_down=down,
        blocks=blocks // parts,
        parts=parts,
        own_rows=OWN_ROWS // 2 if divided_v else OWN_ROWS,
    )


@triton.jit
def channels_of(block, TILING: tl.constexpr, TILE):
    """Channels of V in a block of bit fields of rows of stored tiles, in the order of `load_codes`.

    Blocks of the same stored tiles follow one another. Channels past head_dim are empty.
    """
    FIELDS: tl.constexpr = TILING.v_fields
    DOWN: tl.constexpr = TILING.v_down
    BLOCKS: tl.constexpr = TILE.row_fields // FIELDS
    local = tl.arange(0, TILING.channels)
    down = block // BLOCKS * DOWN + local // (16 * FIELDS)
    return (down * TILE.row_fields + block % BLOCKS * FIELDS + local // 16 % FIELDS) * 16 + local % 16
