"""Decode on pages of levels: packed codes against 8-bit Q and P, as in `decode.py` for pages with minima.

A warp takes one page of one KV head. A code c stands for s·(c - z). z takes one correction per query and none per key.
V's scales go into the weights before these are rounded. Codes of 3 bits take two products, added in integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.level_format import LevelFormat
from hack_kernels.triton.decode import ROUND, new_top_of, top_of
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.level_layout import level_layout
from hack_kernels.triton.level_scales import load_scale_units
from hack_kernels.triton.paged import SPARING, PageReader, paged_launch, rows_of_heads
from hack_kernels.triton.query import query_columns
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.tiles import (
    doubled,
    equal_halves,
    load_row_once,
    load_tiles,
    masked,
    pair_of_tiles,
    rows_ahead,
)


@triton.jit
def total_of(sums):
    """Σ of a tuple."""
    total = sums[0]
    for i in tl.static_range(1, tl.constexpr(len(sums))):
        total += sums[i]
    return total


@triton.jit
def last_sum(sums, TILE: tl.constexpr):
    """Σ of the entries of `sums`, one for each 32 columns, whose columns may lie in the last bit field."""
    STEP: tl.constexpr = TILE.column_fields
    total = sums[0] if len(sums) < STEP else sums[STEP - 1]  # if it is shorter, no columns do, and the result is unused
    for i in tl.static_range(2 * STEP - 1, tl.constexpr(len(sums)), STEP):
        total += sums[i]
    return total


@triton.jit
def level_query_columns(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """Query heads at `q`: codes, a tuple over 32 channels of INT8 [W, 32, N]; their scale FP32 [N], for scores in log2;
    z times their sum FP32 [W, N]; and the sums INT32 [W, N] for flipped bits, one for each plane of codes."""
    codes, scale, _, _, _ = query_columns(q, LAYOUT, heads, W, N)[0]
    sums = ()
    for step in tl.static_range(tl.constexpr(len(codes))):
        sums = sums + (tl.sum(codes[step].to(tl.int32), 1),)
    SIDE: tl.constexpr = LAYOUT.k
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    zero: tl.constexpr = SIDE.zero
    return (
        codes,
        scale,
        zero * total_of(sums).to(tl.float32),
        (last_sum(sums, LOW), last_sum(sums, TOP)),
    )


@triton.jit
def field_product(tiles, operand, flips, TILE: tl.constexpr, m: tl.constexpr, c: tl.constexpr, UNIT: tl.constexpr):
    """The share of `plane_product` for columns that lie in the fields c·Fr .. of stored tiles."""
    STEP: tl.constexpr = TILE.column_fields
    STEPS: tl.constexpr = TILE.column_tiles
    f: tl.constexpr = c * TILE.row_fields + m % TILE.row_fields
    dot = flips if f == TILE.fields - 1 else flips * 0
    for step in tl.static_range(c, STEPS, STEP):
        dot = tl.dot(masked(tiles[step // STEP], f, TILE), operand[step], dot, out_dtype=tl.int32)
    return dot << (UNIT - TILE.bits * f)


@triton.jit
def plane_product(tiles, operand, flips, TILE: tl.constexpr, m: tl.constexpr, UNIT: tl.constexpr):
    """The codes of row tile `m` times `operand`, a tuple over 32 columns of INT8 [W, 32, N], times 2^UNIT: INT32
    [W, 16, N]. `tiles` is the row of stored tiles in which `m` lies. `flips` [W, 16, N] is 128 Σ of the operand over
    columns that may lie in the last bit field."""
    total = field_product(tiles, operand, flips, TILE, m, 0, UNIT)
    for c in tl.static_range(1, tl.constexpr(TILE.column_fields)):
        if c < TILE.column_tiles:
            total += field_product(tiles, operand, flips, TILE, m, c, UNIT)
    return total


@triton.constexpr_function
def unit_of(SIDE, m):
    """The least `unit` for which 2^unit times the products of row tile `m` is whole in every bit field."""
    low = SIDE.low.bits * ((SIDE.low.column_fields - 1) * SIDE.low.row_fields + m % SIDE.low.row_fields)
    top = (SIDE.top.column_fields - 1) * SIDE.top.row_fields + m % SIDE.top.row_fields - 2
    return top if SIDE.split and top > low else low


@triton.jit
def code_product(low, top, operand, low_flips, top_flips, SIDE: tl.constexpr, m: tl.constexpr):
    """Codes of row tile `m` times `operand`, exact in FP32 [W, 16, N]."""
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    unit: tl.constexpr = unit_of(SIDE, m)
    total = plane_product(low, operand, low_flips, LOW, m, unit)
    if SIDE.split:
        total += plane_product(top, operand, top_flips, TOP, m, unit + 2)
    return total.to(tl.float32) * (2.0**-unit)


@triton.jit
def row_of_tiles(tiles, m: tl.constexpr, TILE: tl.constexpr):
    """The stored tiles of the row in which row tile `m` lies."""
    row = ()
    for i in tl.static_range(tl.constexpr(TILE.across)):
        row = row + (tiles[m // TILE.row_fields * TILE.across + i],)
    return row


@triton.jit
def level_scores(record, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores of W pages at `record` [W], in units of log2: a tuple over token tiles of FP32 [W, 16, N]."""
    codes, q_scale, correction, flips = query
    SIDE: tl.constexpr = LAYOUT.k
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    low = load_tiles(record + SIDE.codes, 0, LOW.stored, W)
    top = load_tiles(record + SIDE.high, 0, TOP.stored, W) if SIDE.split else low
    scales = load_scale_units(record + SIDE.scale, LAYOUT.page_tokens // 16, W, SIDE.narrow)
    low_flips = tl.broadcast_to(flips[0][:, None, :] * 128, (W, 16, N))
    top_flips = tl.broadcast_to(flips[1][:, None, :] * 128, (W, 16, N))
    scores = ()
    for m in tl.static_range(tl.constexpr(LAYOUT.page_tokens // 16)):
        low_row = row_of_tiles(low, m, LOW)
        top_row = row_of_tiles(top, m, TOP) if SIDE.split else low_row
        dots = code_product(low_row, top_row, codes, low_flips, top_flips, SIDE, m)
        x = (dots - correction[:, None, :]) * q_scale[None, None, :]
        scores = scores + (x * scales[m][:, :, None],)
    return scores


@triton.jit
def level_weights(scores, page_top, scales, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Weights times the scales of V, rounded to 7 bits: codes, a tuple over 32 tokens of INT8 [W, 32, N]; their scale;
    and Σ of the weights without scales and rounding. The last two are FP32 [W, N]."""
    scaled, total = (), tl.zeros((W, 16, N), tl.float32)
    for m in tl.static_range(tl.constexpr(len(scores))):
        p = tl.exp2(scores[m] - page_top[:, None, :])
        total += p
        scaled = scaled + (p * scales[m][:, :, None],)
    largest = top_of(scaled)
    factor = tl.div_rn(tl.full((W, N), 127.0, tl.float32), largest)
    codes = ()
    for m in tl.static_range(tl.constexpr(len(scores)) // 2):
        low = (scaled[2 * m] * factor[:, None, :] + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
        high = (scaled[2 * m + 1] * factor[:, None, :] + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
        codes = codes + (pair_of_tiles(low, high, W, N),)
    return codes, largest * (1.0 / 127), tl.sum(total, 1)


@triton.jit
def add_level_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages at `record` [W] added to the running softmax, as `decode.add_pages`."""
    top, weight, out = state
    SIDE: tl.constexpr = LAYOUT.v
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    scores = level_scores(record, query, LAYOUT, W, N)
    ahead: tl.constexpr = 0 if SIDE.split else rows_ahead(LOW)  # rows of two planes would spill
    low_rows = load_row_once((), record + SIDE.codes, ahead - 1, LOW, W)  # comes while weights are computed
    top_rows = ()
    if SIDE.split:
        top_rows = load_row_once(top_rows, record + SIDE.high, ahead - 1, TOP, W)
    page_top = top_of(scores)
    new_top, kept, share = new_top_of(top, page_top, valid)
    scales = load_scale_units(record + SIDE.scale, LAYOUT.page_tokens // 16, W, SIDE.narrow)
    codes, p_scale, p_total = level_weights(scores, page_top, scales, LAYOUT, W, N)
    sums = ()
    for step in tl.static_range(tl.constexpr(len(codes))):
        ones = tl.full((W, 16, 32), 1, tl.int8)
        found = tl.dot(ones, codes[step], tl.zeros((W, 16, N), tl.int32), out_dtype=tl.int32)
        sums = sums + (equal_halves(found, W, N),)
    zero: tl.constexpr = SIDE.zero
    correction = zero * total_of(sums).to(tl.float32)
    low_flips = doubled(last_sum(sums, LOW) * 128, W, N)
    top_flips = doubled(last_sum(sums, TOP) * 128, W, N)
    p_scale = p_scale * share
    added = ()
    for m in tl.static_range(tl.constexpr(LAYOUT.head_dim // 16)):
        low_rows = load_row_once(low_rows, record + SIDE.codes, m // LOW.row_fields + ahead, LOW, W)
        if SIDE.split:
            top_rows = load_row_once(top_rows, record + SIDE.high, m // TOP.row_fields + ahead, TOP, W)
        low = low_rows[m // LOW.row_fields]
        high = top_rows[m // TOP.row_fields] if SIDE.split else low
        dots = code_product(low, high, codes, low_flips, top_flips, SIDE, m)
        x = dots - doubled(correction, W, N)
        added = added + (out[m] * kept[:, None, :] + x * p_scale[:, None, :],)
    return new_top, weight * kept[:, None, :] + (p_total * share)[:, None, :], added


def attn_level_decode(fmt: LevelFormat, pool: Pool, spans: Spans, q: Tensor, workspace: Workspace) -> Tensor:
    """`PageKernels.attend` of a decode batch, in one launch and without waiting for the device."""
    q = rows_of_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    level_decode_launch(fmt, pool, spans, q, out, workspace).run()
    return out


def level_decode_launch(
    fmt: LevelFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    layout = level_layout(fmt)
    looks_far = not layout.v.split
    reader = PageReader(level_query_columns, add_level_pages, layout, assembler=SPARING, looks_far=looks_far)
    records = pool.planes["k_codes"]
    return paged_launch(reader, records, records, pool, spans, q, out, workspace)
