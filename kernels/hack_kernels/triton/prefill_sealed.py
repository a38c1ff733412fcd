"""Sealed pages in prefill: Eq. (4) of the paper for M query rows against the codes of one page of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.prefill_tiling import channels_of
from hack_kernels.triton.quantize import divided
from hack_kernels.triton.tiles import (
    bytes_sum,
    field_of,
    linear,
    load_codes,
    load_meta,
    sums_of,
    sums_pointer,
    unit_place,
    zipped,
)


@triton.jit
def sealed_scores(query, record, LAYOUT: tl.constexpr):
    """Eq. (4) for Q·K^T of one sealed page: FP32 [M, Π], tokens in zipped order."""
    TILE: tl.constexpr = LAYOUT.k_tiles
    GROUPS: tl.constexpr = LAYOUT.groups
    ROWS: tl.constexpr = query[0][0].shape[0]
    PI: tl.constexpr = LAYOUT.page_tokens
    token = zipped(tl.arange(0, PI))
    scores = tl.zeros((ROWS, PI), tl.float32)
    for p in tl.static_range(GROUPS):
        q, q_scale, q_min, q_sum = query[p]
        first_tile = p * LAYOUT.partition_tiles // TILE.column_fields
        first_field = p % TILE.column_fields * TILE.row_fields
        codes = load_codes(
            record, TILE, first_field, TILE.row_fields, 0, TILE.down_pad, first_tile, LAYOUT.partition_tiles
        )
        field = field_of(token, first_field, TILE)
        unit = p * (LAYOUT.page_tokens // 16)
        k_scale, k_min = load_meta(record + LAYOUT.k_meta, token, unit, token >= 0)
        scale, minimum = linear(k_scale, k_min, field, TILE)
        dots = tl.dot(q, tl.trans(codes)).to(tl.float32)
        scores += q_scale[:, None] * (scale[None, :] * dots + minimum[None, :] * q_sum[:, None])
        if LAYOUT.asymmetric:
            if LAYOUT.sums:
                at = sums_pointer(record + LAYOUT.k_sums, LAYOUT.wide_k_sums) + unit_place(token, unit)
                sums = tl.load(at).to(tl.float32)
            else:
                sums = sums_of(codes, field, TILE).to(tl.float32)
            scores += q_min[:, None] * (k_scale * sums + LAYOUT.partition * k_min)[None, :]
    return scores


@triton.jit
def weight_codes(weights, ASYMMETRIC: tl.constexpr):
    """Weights [M, Π] in 0..1 to INT8 [M, Π], and FP32 [M]: step, minimum and sum of the codes in 0..127 or 0..255.

    Codes of 0..255 are returned less 128. `weigh` adds that again in integers, because FP32 terms would cancel too
    much.
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
def weigh(p, step, low, p_sum, record, block, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """Eq. (4) for P·V of one sealed page and the channels of a block: FP32 [M, channels]."""
    TILE: tl.constexpr = LAYOUT.v_tiles
    FIELDS: tl.constexpr = TILING.v_fields
    DOWN: tl.constexpr = TILING.v_down
    BLOCKS: tl.constexpr = TILE.row_fields // FIELDS
    channel = channels_of(block, TILING, TILE)
    field = field_of(channel, 0, TILE)
    inside = channel < LAYOUT.head_dim
    first_field, first_down = block % BLOCKS * FIELDS, block // BLOCKS * DOWN
    codes = load_codes(record + LAYOUT.v_codes, TILE, first_field, FIELDS, first_down, DOWN, 0, TILE.across)
    v_scale, v_min = load_meta(record + LAYOUT.v_meta, channel, 0, inside)
    scale, minimum = linear(v_scale, v_min, field, TILE)
    dots = tl.dot(p, tl.trans(codes))
    if LAYOUT.asymmetric:
        if LAYOUT.sums:
            at = sums_pointer(record + LAYOUT.v_sums, LAYOUT.wide_v_sums) + unit_place(channel, 0)
            sums = tl.load(at, mask=inside, other=0).to(tl.int32)
        else:
            sums = sums_of(codes, field, TILE)
        dots += (128 * bytes_sum(sums, field, LAYOUT.page_tokens, TILE))[None, :]
    outputs = step[:, None] * (scale[None, :] * dots.to(tl.float32)) + (step * p_sum)[:, None] * minimum[None, :]
    if LAYOUT.asymmetric:
        outputs += low[:, None] * (v_scale * sums.to(tl.float32) + LAYOUT.page_tokens * v_min)[None, :]
    return outputs


@triton.jit
def add_page(state, query, record, first_block, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """A page added to the running softmax: (largest score [M], weight [M], outputs [M, channels] by block of V)."""
    top, total, outputs = state
    BLOCKS: tl.constexpr = TILING.blocks
    scores = sealed_scores(query, record, LAYOUT)
    page_top = tl.max(scores, axis=1)
    higher = tl.maximum(top, page_top)
    kept, added = tl.exp(top - higher), tl.exp(page_top - higher)
    weights, step, low, p_sum = weight_codes(tl.exp(scores - page_top[:, None]), LAYOUT.asymmetric)
    step, low = step * added, low * added
    updated = ()
    for block in tl.static_range(BLOCKS):
        more = weigh(weights, step, low, p_sum, record, first_block + block, TILING, LAYOUT)
        updated = updated + (outputs[block] * kept[:, None] + more,)
    return higher, total * kept + step * p_sum + LAYOUT.page_tokens * low, updated
