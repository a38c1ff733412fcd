"""Homomorphic attention of one query per sequence: packed codes against 8-bit Q and P, page after page.

A warp takes one page of one KV head, and all query heads that share it are the columns of every product. A page costs
two loads of 16 bytes per 1024 codes, one mask per four codes and one matrix instruction per 512 codes and 8 queries;
Eq. (4) of the paper is then evaluated in FP32. Scores never leave registers.

`paged.py` is the frame around it, which the rivals share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import check_records, page_layout
from hack_kernels.triton.paged import (
    ALL_REGISTERS,
    LOWEST,
    REGISTERS,
    SPARING,
    PageReader,
    paged_launch,
    rows_of_heads,
)
from hack_kernels.triton.query import query_columns
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.tiles import (
    doubled,
    equal_halves,
    load_row_once,
    load_sums,
    load_tiles,
    load_unit,
    masked,
    pair_of_tiles,
    rows_ahead,
)

ROUND = tl.constexpr(12582912.0)
"""1.5·2^23: added to a small FP32, its low byte is the nearest integer."""


@triton.jit
def add_partition(
    score, record, tiles, part, LAYOUT: tl.constexpr, m: tl.constexpr, p: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """Eq. (4) over partition `p` for the keys of token tile `m`, added to their scores FP32 [W, 16, N]."""
    codes, q_scale, q_minimum, constant, q_sums = part
    TILES: tl.constexpr = LAYOUT.k_tiles
    across: tl.constexpr = TILES.across
    bits: tl.constexpr = TILES.bits
    row_fields: tl.constexpr = TILES.row_fields
    column_fields: tl.constexpr = TILES.column_fields
    steps: tl.constexpr = LAYOUT.partition // 32
    unit: tl.constexpr = p * (LAYOUT.page_tokens // 16) + m
    f: tl.constexpr = (p * steps) % column_fields * row_fields + m % row_fields
    last: tl.constexpr = f == TILES.fields - 1
    flipped = q_sums * 128 if last and not LAYOUT.asymmetric else q_sums * 0
    dot = tl.broadcast_to(flipped[None, None, :], (W, 16, N))
    for step in tl.static_range(steps):
        tile = tiles[m // row_fields * across + (p * steps + step) // column_fields]
        dot = tl.dot(masked(tile, f, TILES), codes[step], dot, out_dtype=tl.int32)
    scale, minimum = load_unit(record + LAYOUT.k_meta, unit, W)
    if LAYOUT.asymmetric:
        # K's scale takes the field's weight, and K's minimum and sums take its flipped bit. Scales and sums of Q per
        # field would do the same, but would occupy registers for all pages.
        if LAYOUT.sums:
            sums = load_sums(record + LAYOUT.k_sums, LAYOUT.wide_k_sums, unit, W)[:, :, None] << (bits * f)
            sums -= LAYOUT.partition * 128 if last else 0
        else:
            sums = tl.zeros((W, 16, N), tl.int32)
            for step in tl.static_range(steps):
                tile = tiles[m // row_fields * across + (p * steps + step) // column_fields]
                ones = tl.full((W, 32, N), 1, tl.int8)
                sums = tl.dot(masked(tile, f, TILES), ones, sums, out_dtype=tl.int32)
        x = dot.to(tl.float32) * q_scale[None, None, :] + sums.to(tl.float32) * q_minimum[None, None, :]
        scale *= 2.0 ** (-bits * f)
        minimum += scale * (128.0 if last else 0.0)
    else:
        x = dot.to(tl.float32) * (q_scale * 2.0 ** (-bits * f))[None, None, :]
    score += scale[:, :, None] * x
    return score + minimum[:, :, None] * constant[None, None, :]


@triton.jit
def page_scores(record, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores of W pages at `record` [W], in units of log2: a tuple over token tiles of FP32 [W, 16, N]."""
    tiles = load_tiles(record, 0, LAYOUT.k_tiles.stored, W)
    scores = ()
    for m in tl.static_range(tl.constexpr(LAYOUT.page_tokens // 16)):
        score = tl.zeros((W, 16, N), tl.float32)
        for p in tl.static_range(tl.constexpr(LAYOUT.groups)):
            score = add_partition(score, record, tiles, query[p], LAYOUT, m, p, W, N)
        scores = scores + (score,)
    return scores


@triton.jit
def top_of(scores):
    """Largest score of every page and query: a tuple of [W, 16, N] -> [W, N]."""
    top = scores[0]
    for m in tl.static_range(1, tl.constexpr(len(scores))):
        top = tl.maximum(top, scores[m])
    return tl.max(top, 1)


@triton.jit
def quantized_weights(scores, top, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """exp2(scores - top) in 8 bits: codes, a tuple over 32 tokens of int8 [W, 32, N], and scale and minimum [W, N] of
    the page.

    Asymmetric codes 0..255 are returned less 128.
    """
    weights = ()
    for m in tl.static_range(tl.constexpr(len(scores))):
        weights = weights + (tl.exp2(scores[m] - top[:, None, :]),)
    if LAYOUT.asymmetric:
        lowest = weights[0]
        for m in tl.static_range(1, tl.constexpr(len(scores))):
            lowest = tl.minimum(lowest, weights[m])
        low = tl.min(lowest, 1)
        scale = (1.0 - low) * (1.0 / 255)
        scale = tl.where(scale == 0.0, 1.0, scale)
        factor, origin = 1.0 / scale, ROUND - 128.0
    else:
        scale = tl.full((W, N), 1.0 / 127, tl.float32)
        factor, origin = tl.full((W, N), 127.0, tl.float32), ROUND + 0.0
        low = tl.zeros((W, N), tl.float32)
    codes = ()
    for m in tl.static_range(tl.constexpr(len(scores))):
        rounded = (weights[m] - low[:, None, :]) * factor[:, None, :] + origin
        codes = codes + (rounded.to(tl.int32, bitcast=True).to(tl.int8),)
    pairs = ()
    for step in tl.static_range(tl.constexpr(len(scores)) // 2):
        pairs = pairs + (pair_of_tiles(codes[2 * step], codes[2 * step + 1], W, N),)
    return pairs, scale, low


@triton.jit
def add_channels(
    out, record, tiles, weights, kept, terms, LAYOUT: tl.constexpr, m: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """Eq. (4) of P·V for channel tile `m`, added to its outputs FP32 [W, 16, N]."""
    p_sums, p_scale, p_minimum, p_total = terms
    PI: tl.constexpr = LAYOUT.page_tokens
    TILES: tl.constexpr = LAYOUT.v_tiles
    bits: tl.constexpr = TILES.bits
    f: tl.constexpr = m % TILES.fields
    last: tl.constexpr = f == TILES.fields - 1
    steps: tl.constexpr = PI // 32
    flipped = doubled(p_sums * 128 if last else p_sums * 0, W, N)
    if LAYOUT.asymmetric:
        # P's codes are signed for the product only; as 0..255 again, the terms of Eq. (4) do not cancel in FP32.
        if LAYOUT.sums:
            sums = load_sums(record + LAYOUT.v_sums, LAYOUT.wide_v_sums, m, W)[:, :, None] << (bits * f)
        else:
            sums = tl.full((W, 16, N), PI * 128 if last else 0, tl.int32)
            for step in tl.static_range(steps):
                ones = tl.full((W, 32, N), 1, tl.int8)
                sums = tl.dot(masked(tiles[step], f, TILES), ones, sums, out_dtype=tl.int32)
        dot = flipped + sums * 128
        for step in tl.static_range(steps):
            dot = tl.dot(masked(tiles[step], f, TILES), weights[step], dot, out_dtype=tl.int32)
        x = dot.to(tl.float32) * (p_scale * 2.0 ** (-bits * f))[:, None, :]
        x += sums.to(tl.float32) * (p_minimum * 2.0 ** (-bits * f))[:, None, :]
    else:
        dot = flipped
        for step in tl.static_range(steps):
            dot = tl.dot(masked(tiles[step], f, TILES), weights[step], dot, out_dtype=tl.int32)
        x = dot.to(tl.float32) * (p_scale * 2.0 ** (-bits * f))[:, None, :]
    scale, minimum = load_unit(record + LAYOUT.v_meta, m, W)
    out = out * kept[:, None, :] + scale[:, :, None] * x
    return out + minimum[:, :, None] * p_total


@triton.jit
def new_top_of(top, page_top, valid):
    """The top of the running softmax after W pages whose own tops are `page_top` [W, N]. Also the factor by which the
    weights so far shrink, and the pages' factor. The latter is 0 for pages that are not `valid` [W]."""
    counted = tl.where(valid[:, None], page_top, 2 * LOWEST)  # below any `top`
    new_top = tl.maximum(top, counted)
    return new_top, tl.exp2(top - new_top), tl.exp2(counted - new_top)


@triton.jit
def add_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages at `record` [W] added to the running softmax: (largest score [W, N], weight [W, 8, N], outputs)."""
    top, weight, out = state
    PI: tl.constexpr = LAYOUT.page_tokens
    TILES: tl.constexpr = LAYOUT.v_tiles
    fields: tl.constexpr = TILES.fields
    scores = page_scores(record, query, LAYOUT, W, N)
    ahead: tl.constexpr = rows_ahead(TILES)
    rows = load_row_once((), record + LAYOUT.v_codes, ahead - 1, TILES, W)  # comes while weights are computed
    page_top = top_of(scores)
    new_top, kept, share = new_top_of(top, page_top, valid)
    weights, p_scale, p_minimum = quantized_weights(scores, page_top, LAYOUT, W, N)
    p_scale, p_minimum = p_scale * share, p_minimum * share
    # A product with ones sums the weights in the place and layout in which they are wanted.
    p_sums = tl.zeros((W, 16, N), tl.int32)
    for step in tl.static_range(PI // 32):
        p_sums = tl.dot(tl.full((W, 16, 32), 1, tl.int8), weights[step], p_sums, out_dtype=tl.int32)
    if LAYOUT.asymmetric:
        p_total = (p_sums + 128 * PI).to(tl.float32) * p_scale[:, None, :] + (PI * p_minimum)[:, None, :]
    else:
        p_total = p_sums.to(tl.float32) * p_scale[:, None, :]
    terms = (equal_halves(p_sums, W, N), p_scale, p_minimum, p_total)

    added = ()
    for m in tl.static_range(tl.constexpr(LAYOUT.v_units)):
        rows = load_row_once(rows, record + LAYOUT.v_codes, m // fields + ahead, TILES, W)
        added = added + (add_channels(out[m], record, rows[m // fields], weights, kept, terms, LAYOUT, m, W, N),)
    return new_top, weight * kept[:, None, :] + equal_halves(p_total, W, N), added


def attn_decode(fmt: HackFormat, pool: Pool, spans: Spans, q: Tensor, workspace: Workspace) -> Tensor:
    """`PageKernels.attend` of a decode batch for `OpenPage.EXACT`, in one launch and without waiting for the device."""
    check_records(fmt, pool.planes)
    q = rows_of_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_launch(fmt, pool, spans, q, out, workspace).run()
    return out


def decode_launch(fmt: HackFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    layout = page_layout(fmt)
    # Pages above 16 KiB spill within `REGISTERS` on sm_100. Two programs with such pages still read more at a time than
    # three with pages of half the size.
    registers = ALL_REGISTERS if layout.asymmetric or layout.nbytes > 2**14 else REGISTERS
    reader = PageReader(
        query_columns,
        add_pages,
        layout,
        registers,
        few_columns=layout.asymmetric,
        assembler=SPARING,
        sparing=layout.asymmetric or fmt.page_tokens < 128,  # machine code shows: sparing spills with 128 tokens
    )
    records = pool.planes["k_codes"]
    return paged_launch(reader, records, records, pool, spans, q, out, workspace)
