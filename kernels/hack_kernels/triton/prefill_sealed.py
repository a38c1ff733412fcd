"""Sealed pages in prefill: Eq. (4) of the paper for M query rows against the codes of one page of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.prefill_tiling import channels_of
from hack_kernels.triton.quantize import divided, query_codes
from hack_kernels.triton.tiles import (
    bytes_sum,
    field_of,
    linear,
    load_codes,
    load_meta,
    sums_of,
    sums_pointer,
    unit_place,
)


@triton.jit
def quantized_query(q_rows, seen_rows, SHAPE: tl.constexpr):
    """Rows of Q at `q_rows` [M], scaled by 1/sqrt(D): what `query_codes` makes of them, a tuple over partitions."""
    GROUPS: tl.constexpr = SHAPE.groups
    z = tl.arange(0, SHAPE.partition_pad)
    inside = (z < SHAPE.partition)[None, :]
    query = ()
    for p in tl.static_range(GROUPS):
        x = tl.load(q_rows[:, None] + (p * SHAPE.partition + z)[None, :], mask=seen_rows[:, None] & inside, other=0.0)
        query = query + (query_codes(divided(x.to(tl.float32), SHAPE.root), inside, SHAPE.asymmetric),)
    return query


@triton.jit
def sealed_scores(query, record, SHAPE: tl.constexpr):
    """Eq. (4) for Q·K^T of one sealed page: FP32 [M, Π]."""
    TILE: tl.constexpr = SHAPE.k
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = query[0][0].shape[0]
    PI: tl.constexpr = SHAPE.page_tokens
    token = tl.arange(0, PI)
    scores = tl.zeros((ROWS, PI), tl.float32)
    for p in tl.static_range(GROUPS):
        q, q_scale, q_min, q_sum = query[p]
        first_tile = p * SHAPE.partition_tiles // TILE.column_fields
        first_field = p % TILE.column_fields * TILE.row_fields
        codes = load_codes(
            record, TILE, first_field, TILE.row_fields, 0, TILE.down_pad, first_tile, SHAPE.partition_tiles
        )
        field = field_of(token, first_field, TILE)
        unit = p * (SHAPE.page_tokens // 16)
        k_scale, k_min = load_meta(record + SHAPE.k_meta, token, unit, token >= 0)
        scale, minimum = linear(k_scale, k_min, field, TILE)
        dots = tl.dot(q, tl.trans(codes)).to(tl.float32)
        scores += q_scale[:, None] * (scale[None, :] * dots + minimum[None, :] * q_sum[:, None])
        if SHAPE.asymmetric:
            if SHAPE.sums:
                at = sums_pointer(record + SHAPE.k_sums, SHAPE.k_wide_sums) + unit_place(token, unit)
                sums = tl.load(at).to(tl.float32)
            else:
                sums = sums_of(codes, field, TILE).to(tl.float32)
            scores += q_min[:, None] * (k_scale * sums + SHAPE.partition * k_min)[None, :]
    return scores


@triton.jit
def weight_codes(weights, ASYMMETRIC: tl.constexpr):
    """Weights [M, Π] in 0..1 to INT8 [M, Π], and FP32 [M]: step, minimum and sum of the codes in 0..127 or 0..255.

    Codes of 0..255 are handed out less 128; `weigh` makes up for it in integers, as in FP32 it would cancel too much.
    """
    ROWS: tl.constexpr = weights.shape[0]
    if ASYMMETRIC:
        low = tl.min(weights, axis=1)
        step = divided(1.0 - low, 255.0)
        step = tl.where(step == 0.0, 1.0, step)
        p = tl.floor((weights - low[:, None]) / step[:, None] + 0.5)
        codes = (p - 128.0).to(tl.int8)
    else:
        low = tl.zeros((ROWS,), tl.float32)
        step = tl.full((ROWS,), 1.0 / 127.0, tl.float32)
        p = tl.floor(weights * 127.0 + 0.5)
        codes = p.to(tl.int8)
    return codes, step, low, tl.sum(p, axis=1)


@triton.jit
def weigh(p, step, low, p_sum, record, block, TILING: tl.constexpr, SHAPE: tl.constexpr):
    """Eq. (4) for P·V of one sealed page and the channels of a block: FP32 [M, channels]."""
    TILE: tl.constexpr = SHAPE.v
    FIELDS: tl.constexpr = TILING.v_fields
    DOWN: tl.constexpr = TILING.v_down
    BLOCKS: tl.constexpr = TILE.row_fields // FIELDS
    channel = channels_of(block, TILING, TILE)
    field = field_of(channel, 0, TILE)
    inside = channel < SHAPE.head_dim
    first_field, first_down = block % BLOCKS * FIELDS, block // BLOCKS * DOWN
    codes = load_codes(record + SHAPE.v_codes, TILE, first_field, FIELDS, first_down, DOWN, 0, TILE.across)
    v_scale, v_min = load_meta(record + SHAPE.v_meta, channel, 0, inside)
    scale, minimum = linear(v_scale, v_min, field, TILE)
    dots = tl.dot(p, tl.trans(codes))
    if SHAPE.asymmetric:
        if SHAPE.sums:
            at = sums_pointer(record + SHAPE.v_sums, SHAPE.v_wide_sums) + unit_place(channel, 0)
            sums = tl.load(at, mask=inside, other=0).to(tl.int32)
        else:
            sums = sums_of(codes, field, TILE)
        dots += (128 * bytes_sum(sums, field, SHAPE.page_tokens, TILE))[None, :]
    outputs = step[:, None] * (scale[None, :] * dots.to(tl.float32)) + (step * p_sum)[:, None] * minimum[None, :]
    if SHAPE.asymmetric:
        outputs += low[:, None] * (v_scale * sums.to(tl.float32) + SHAPE.page_tokens * v_min)[None, :]
    return outputs


@triton.jit
def add_page(state, query, record, first_block, TILING: tl.constexpr, SHAPE: tl.constexpr):
    """A page added to the running softmax: (largest score [M], weight [M], outputs [M, channels] by block of V)."""
    top, total, outputs = state
    BLOCKS: tl.constexpr = TILING.blocks
    scores = sealed_scores(query, record, SHAPE)
    page_top = tl.max(scores, axis=1)
    higher = tl.maximum(top, page_top)
    kept, added = tl.exp(top - higher), tl.exp(page_top - higher)
    weights, step, low, p_sum = weight_codes(tl.exp(scores - page_top[:, None]), SHAPE.asymmetric)
    step, low = step * added, low * added
    updated = ()
    for block in tl.static_range(BLOCKS):
        more = weigh(weights, step, low, p_sum, record, first_block + block, TILING, SHAPE)
        updated = updated + (outputs[block] * kept[:, None] + more,)
    return higher, total * kept + step * p_sum + SHAPE.page_tokens * low, updated
