"""Prefill on pages of levels: the functions that `prefill.py` needs for a kind of page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hack_kernels.level_format import LevelFormat
from hack_kernels.triton.level_layout import level_layout
from hack_kernels.triton.level_scales import load_row_scales
from hack_kernels.triton.prefill import PromptReader
from hack_kernels.triton.prefill_tiling import OWN_ROWS, QUERY_ROWS, TILES_AT_ONCE, Tiling
from hack_kernels.triton.quantize import divided
from hack_kernels.triton.query import query_levels, query_scale
from hack_kernels.triton.tiles import linear, load_codes, zipped

CHANNELS_AT_ONCE = tl.constexpr(128)
"""Channels of K that are multiplied at once: tiles that a load of codes takes."""


@triton.jit
def level_query_rows(q_rows, seen_rows, LAYOUT: tl.constexpr):
    """Rows of Q at `q_rows` [M]: codes, a tuple over 128 channels of INT8 [M, 128], or fewer; their scale and z times
    their sum, FP32 [M]."""
    D: tl.constexpr = LAYOUT.head_dim
    WIDTH: tl.constexpr = CHANNELS_AT_ONCE if D > CHANNELS_AT_ONCE else triton.next_power_of_2(D)
    PIECES: tl.constexpr = triton.cdiv(D, WIDTH)
    ROWS: tl.constexpr = q_rows.shape[0]
    size = tl.zeros((ROWS,), tl.float32)
    for piece in tl.static_range(PIECES):
        channel = piece * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(q_rows[:, None] + channel, mask=seen_rows[:, None] & (channel < D), other=0.0)
        size = tl.maximum(size, tl.max(tl.abs(divided(x.to(tl.float32), LAYOUT.root)), axis=1))
    scale = query_scale(size, False)
    codes, total = (), tl.zeros((ROWS,), tl.float32)
    for piece in tl.static_range(PIECES):
        channel = piece * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(q_rows[:, None] + channel, mask=seen_rows[:, None] & (channel < D), other=0.0)
        x = divided(x.to(tl.float32), LAYOUT.root)
        levels = query_levels(x, scale[:, None] + tl.zeros_like(x), False)
        codes = codes + (levels.to(tl.int8),)
        total += tl.sum(levels, axis=1)
    return codes, scale, total * LAYOUT.k.zero


@triton.jit
def columns_of(x, c: tl.constexpr, TILE: tl.constexpr):
    """The columns of x [M, C] whose codes lie in the fields c·Fr .. of stored tiles: [M, C / Fc], in groups of 32."""
    SHARING: tl.constexpr = TILE.sharing
    M: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if SHARING == 1:
        part = x
    elif SHARING == 2:
        split = tl.permute(tl.reshape(x, (M, C // 64, 2, 32)), (0, 1, 3, 2))
        part = tl.reshape(tl.split(split)[c], (M, C // 2))
    else:
        split = tl.permute(tl.reshape(x, (M, C // 128, 2, 2, 32)), (0, 1, 4, 2, 3))
        part = tl.reshape(tl.split(tl.split(split)[c % 2])[c // 2], (M, C // 4))
    return part


@triton.jit
def add_product(
    total, operand, codes, UP: tl.constexpr, TILE: tl.constexpr, first, FIELDS: tl.constexpr, DOWN: tl.constexpr,
    first_across, ACROSS: tl.constexpr,
):  # fmt: skip
    """`total` FP32 [M, R] plus UP times `operand` INT8 [M, C] times codes, exact. The codes' rows are FIELDS fields of
    DOWN rows of stored tiles, from row tile `first` on; their columns are ACROSS stored tiles from `first_across`
    on."""
    row = tl.arange(0, DOWN * FIELDS * 16)
    for c in tl.static_range(tl.constexpr(TILE.column_fields)):
        if c < TILE.column_tiles:
            first_field = c * TILE.row_fields + first % TILE.row_fields
            part = columns_of(operand, c, TILE)
            tile = load_codes(codes, TILE, first_field, FIELDS, first // TILE.row_fields, DOWN, first_across, ACROSS)
            field = first_field + row // 16 % FIELDS
            step, origin = linear(tl.full(row.shape, UP, tl.float32), tl.zeros(row.shape, tl.float32), field, TILE)
            dots = tl.dot(part, tl.trans(tile)).to(tl.float32)
            total += step[None, :] * dots
            if c == TILE.column_fields - 1:
                total += origin[None, :] * tl.sum(part.to(tl.int32), axis=1).to(tl.float32)[:, None]
    return total


@triton.jit
def level_page_scores(query, record, LAYOUT: tl.constexpr):
    """Scores FP32 [M, Π] of one sealed page, tokens in zipped order."""
    codes, q_scale, correction = query
    SIDE: tl.constexpr = LAYOUT.k
    PI: tl.constexpr = LAYOUT.page_tokens
    PIECES: tl.constexpr = len(codes)
    ROWS: tl.constexpr = codes[0].shape[0]
    token = zipped(tl.arange(0, PI))
    dots = tl.zeros((ROWS, PI), tl.float32)
    for piece in tl.static_range(PIECES):
        dots = add_side(dots, codes[piece], record, SIDE, 0, PI // 16, piece, PIECES)
    scale = load_row_scales(record + SIDE.scale, token, SIDE.narrow)
    return (dots - correction[:, None]) * q_scale[:, None] * scale[None, :]


@triton.jit
def add_side(dots, operand, record, SIDE: tl.constexpr, first, TILES: tl.constexpr, piece, PIECES: tl.constexpr):
    """`dots` [M, 16·TILES] plus `operand` [M, C] times TILES row tiles of K or V, from `first` on. The columns are the
    `piece`-th of PIECES parts."""
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    LOW_FIELDS: tl.constexpr = LOW.row_fields if LOW.row_fields < TILES else TILES
    TOP_FIELDS: tl.constexpr = TOP.row_fields if TOP.row_fields < TILES else TILES
    LOW_ACROSS: tl.constexpr = LOW.across // PIECES
    TOP_ACROSS: tl.constexpr = TOP.across // PIECES
    dots = add_product(
        dots, operand, record + SIDE.codes, 1.0, LOW, first, LOW_FIELDS, TILES // LOW_FIELDS, piece * LOW_ACROSS,
        LOW_ACROSS,
    )  # fmt: skip
    if SIDE.split:
        dots = add_product(
            dots, operand, record + SIDE.high, 4.0, TOP, first, TOP_FIELDS, TILES // TOP_FIELDS, piece * TOP_ACROSS,
            TOP_ACROSS,
        )  # fmt: skip
    return dots


@triton.jit
def add_level_page(state, query, record, first_block, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """A page added to the running softmax, as `prefill_sealed.add_page`."""
    top, total, outputs = state
    SIDE: tl.constexpr = LAYOUT.v
    CHANNELS: tl.constexpr = TILING.channels
    TILES: tl.constexpr = CHANNELS // 16
    ROWS: tl.constexpr = top.shape[0]
    BLOCKS: tl.constexpr = TILING.blocks
    scores = level_page_scores(query, record, LAYOUT)
    page_top = tl.max(scores, axis=1)
    higher = tl.maximum(top, page_top)
    kept, added = tl.exp(top - higher), tl.exp(page_top - higher)
    weights = tl.exp(scores - page_top[:, None])
    token = zipped(tl.arange(0, LAYOUT.page_tokens))
    scaled = weights * load_row_scales(record + SIDE.scale, token, SIDE.narrow)[None, :]
    largest = tl.max(scaled, axis=1)
    p = tl.floor(scaled * tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), largest)[:, None] + 0.5)
    codes, correction = p.to(tl.int8), tl.sum(p, axis=1) * SIDE.zero
    take = largest * added * (1.0 / 127.0)
    updated = ()
    for block in tl.static_range(BLOCKS):
        dots = tl.zeros((ROWS, CHANNELS), tl.float32)
        dots = add_side(dots, codes, record, SIDE, (first_block + block) * TILES, TILES, 0, 1)
        updated = updated + (outputs[block] * kept[:, None] + take[:, None] * (dots - correction[:, None]),)
    return higher, total * kept + added * tl.sum(weights, axis=1), updated


def level_prompt_reader(fmt: LevelFormat, dtype: torch.dtype) -> PromptReader:
    """The reader of pages of levels, for queries of `dtype`."""
    layout = level_layout(fmt)
    return PromptReader(level_query_rows, add_level_page, layout, _tiling(fmt, dtype))


def _tiling(fmt: LevelFormat, dtype: torch.dtype) -> Tiling:
    """Blocks of consecutive channels, which both planes of codes of 3 bits have side by side."""
    fields = level_layout(fmt).v.low.row_fields
    # With two products for K and for V, 32 rows spill on sm_90 and sm_100 at D = 128.
    split = fmt.k_bits == fmt.v_bits == 3
    half = fmt.head_dim > (64 if split else 128) or fmt.page_tokens == 32 or dtype is torch.float32
    return Tiling(
        rows=QUERY_ROWS // 2 if half else QUERY_ROWS,
        warps=4 if fmt.page_tokens > 32 else 2,
        v_fields=fields,
        v_down=TILES_AT_ONCE // fields,
        blocks=-(-fmt.head_dim // (16 * TILES_AT_ONCE)),
        parts=1,
        own_rows=OWN_ROWS,
    )
