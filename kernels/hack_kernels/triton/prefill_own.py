"""The own page in prefill: FP16 rows, some in the sequence's open page and the others in the batch."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.own_page import two_halves
from hack_kernels.triton.prefill_tiling import channels_of
from hack_kernels.triton.quantize import codes_of, divided, extremes, noise_of, scale_of


@triton.jit
def own_rows(open_rows, batch_rows, token, column, start, end, row_stride, WIDTH: tl.constexpr):
    """FP16 rows [R, C] at positions `token`: those before the batch lie in the open page, the others in the batch.

    Both pointers are moved so that position t is t rows away: WIDTH elements a row in the open page, `row_stride` in
    the batch.
    """
    inside = column[None, :] < WIDTH
    early, late = token < start, (token >= start) & (token < end)
    old = tl.load(
        open_rows + token[:, None].to(tl.int64) * WIDTH + column[None, :], mask=early[:, None] & inside, other=0.0
    )
    new = tl.load(
        batch_rows + token[:, None].to(tl.int64) * row_stride + column[None, :], mask=late[:, None] & inside, other=0.0
    )
    return tl.where(early[:, None], old, new)


@triton.jit
def exact_scores(
    q_rows, seen_rows, open_k, batch_k, token, start, end, row_stride, EXACT_QK: tl.constexpr, LAYOUT: tl.constexpr
):
    """Q·K^T / sqrt(D) against FP16 rows of the own page: FP32 [M, R]."""
    STEPS: tl.constexpr = (LAYOUT.head_dim + 63) // 64
    ROWS: tl.constexpr = q_rows.shape[0]
    COLUMNS: tl.constexpr = token.shape[0]
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(STEPS):
        column = step * 64 + tl.arange(0, 64)
        seen = seen_rows[:, None] & (column < LAYOUT.head_dim)[None, :]
        q = tl.load(q_rows[:, None] + column[None, :], mask=seen, other=0.0).to(tl.float32)
        k = own_rows(open_k, batch_k, token, column, start, end, row_stride, LAYOUT.head_dim).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=EXACT_QK)
    return divided(scores, LAYOUT.root)


@triton.jit
def code_scores(query, open_k, batch_k, token, start, end, row_stride, head, layer, seed, LAYOUT: tl.constexpr):
    """Eq. (4) against rows of the own page that are quantized here: FP32 [M, R]."""
    GROUPS: tl.constexpr = LAYOUT.groups
    z = tl.arange(0, LAYOUT.partition_pad)
    seen = (token >= 0)[:, None] & (z < LAYOUT.partition)[None, :]
    ROWS: tl.constexpr = query[0][0].shape[0]
    COLUMNS: tl.constexpr = token.shape[0]
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for p in tl.static_range(GROUPS):
        q, q_scale, q_min, q_sum = query[p]
        channel = p * LAYOUT.partition + z
        x = own_rows(open_k, batch_k, token, channel, start, end, row_stride, LAYOUT.head_dim).to(tl.float32)
        low, high = extremes(x, seen)
        scale = scale_of(low, high, LAYOUT.k_tiles.levels).to(tl.float32)
        blocks = p * LAYOUT.partition // 8 + tl.arange(0, LAYOUT.partition_pad // 8)
        noise = noise_of(seed, layer, head, token, blocks, 0, LAYOUT.stochastic)
        codes = tl.where(seen, codes_of(x, low, scale, noise, LAYOUT.k_tiles.levels), 0)
        dots = tl.dot(q, tl.trans(codes.to(tl.int8))).to(tl.float32)
        scores += q_scale[:, None] * (scale[None, :] * dots + low[None, :] * q_sum[:, None])
        if LAYOUT.asymmetric:
            sums = tl.sum(codes, axis=1).to(tl.float32)
            scores += q_min[:, None] * (scale * sums + LAYOUT.partition * low)[None, :]
    return scores


@triton.jit
def add_rows(
    state,
    scores,
    open_v,
    batch_v,
    token,
    start,
    end,
    row_stride,
    first_block,
    TILING: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Rows of V with `scores` [M, R] added to the running softmax of `prefill_sealed.add_page`.

    The rows are FP16, so weights are split into two FP16 numbers, which hold 22 bits.
    """
    top, total, outputs = state
    BLOCKS: tl.constexpr = TILING.blocks
    V: tl.constexpr = LAYOUT.v_tiles
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights, kept = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
    high, rest = two_halves(weights)
    updated = ()
    for block in tl.static_range(BLOCKS):
        channel = channels_of(first_block + block, TILING, V)
        values = own_rows(open_v, batch_v, token, channel, start, end, row_stride, LAYOUT.head_dim)
        more = tl.dot(high, values) + tl.dot(rest, values) * (1.0 / 2048.0)
        updated = updated + (outputs[block] * kept[:, None] + more,)
    return higher, total * kept + tl.sum(weights, axis=1), updated
