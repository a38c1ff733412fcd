"""The rival that reads the same pages and turns every code into its FP16 value before it multiplies. For benchmarks.

It is tuned as carefully as `hack_kernels/triton/decode.py`: 16-byte loads, values made in the registers from which the
matrix unit reads them (two codes per instruction), weights of P in FP16, the softmax rescaled inside the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hack_kernels.base import Pool, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import check_records, page_layout
from hack_kernels.triton.paged import LOWEST, PageReader, paged_launch, rows_of_heads
from hack_kernels.triton.query import LOG2_E
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.tiles import INTERPRETED, doubled, equal_halves, load_unit
from torch import Tensor


@triton.jit
def load_paired_tile(codes, index: tl.constexpr, W: tl.constexpr):
    """Stored tile `index` of W pages, int8 [W, 16, 32], with columns in the order of `paired`. In this order a lane's
    own bytes are operands of FP16 products, whose lanes hold pairs of columns 8 apart."""
    packed = tl.load(codes[:, None] + (index * 512 + tl.arange(0, 512))[None, :])
    split = tl.reshape(
        packed.to(tl.int8, bitcast=True), (W, 8, 4, 2, 2, 2, 2)
    )  # row, quad, column half, row half, pair
    return tl.reshape(tl.permute(split, (0, 4, 1, 3, 5, 2, 6)), (W, 16, 32))


@triton.jit
def paired(column):
    """Column of a code tile that stands at place `column` of 0..31: bits (half, pair, quad, quad, one)."""
    return column // 16 * 16 + column // 2 % 4 * 4 + column // 8 % 2 * 2 + column % 2


@triton.jit
def values(tile, scale, minimum, index: tl.constexpr, bits: tl.constexpr, W: tl.constexpr):
    """FP16 values [W, 16, 32] of the codes in bit field `index`; scale and minimum FP32 [W, 16].

    A byte becomes FP16 by setting the exponent of 1024 above it. Fused multiply-adds do the rest, in pairs.
    """
    s = tl.broadcast_to(scale.to(tl.float16)[:, :, None], (W, 16, 32))
    m = tl.broadcast_to(minimum.to(tl.float16)[:, :, None], (W, 16, 32))
    mask: tl.constexpr = ((1 << bits) - 1) << (bits * index)
    if INTERPRETED:
        field = (tile.to(tl.int32) ^ 0x80) & mask
        return (field >> (bits * index)).to(tl.float16) * s + m
    signed: tl.constexpr = mask - 256 if mask > 127 else mask
    masks = tl.full((W, 16, 32), signed, tl.int8)
    flips = tl.full((W, 16, 32), -128 if mask > 127 else 0, tl.int8)
    steps = tl.full((W, 16, 32), 2.0 ** (-bits * index), tl.float16)
    origins = tl.full((W, 16, 32), -1024.0 * 2.0 ** (-bits * index), tl.float16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 f, low, high;
        lop3.b32 f, $2, $3, $4, 0x6a;
        prmt.b32 low, f, 0x64646464, 0x4140;
        prmt.b32 high, f, 0x64646464, 0x4342;
        fma.rn.f16x2 low, low, $5, $7;
        fma.rn.f16x2 high, high, $6, $8;
        fma.rn.f16x2 $0, low, $9, $11;
        fma.rn.f16x2 $1, high, $10, $12;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r",
        [tile, masks, flips, steps, origins, s, m],
        tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def half_query(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """Query heads at `q` in FP16, scaled for scores in log2: a tuple over 32 channels of [W, 32, N] in paired order."""
    D: tl.constexpr = LAYOUT.head_dim
    head = tl.arange(0, N)[None, :]
    query = ()
    for c in tl.static_range(D // 32):
        channel = c * 32 + paired(tl.arange(0, 32))[:, None]
        x = tl.load(q + head * D + channel, mask=head < heads, other=0.0).to(tl.float32)
        x = (x * (LOG2_E * D**-0.5)).to(tl.float16)
        query = query + (tl.broadcast_to(x[None, :, :], (W, 32, N)),)
    return query


@triton.jit
def tile_scores(record, tiles, query, LAYOUT: tl.constexpr, m: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores FP32 [W, 16, N] of token tile `m`."""
    across: tl.constexpr = LAYOUT.k_tiles.across
    bits: tl.constexpr = LAYOUT.k_tiles.bits
    row_fields: tl.constexpr = LAYOUT.k_tiles.row_fields
    column_fields: tl.constexpr = LAYOUT.k_tiles.column_fields
    token_tiles: tl.constexpr = LAYOUT.page_tokens // 16
    steps: tl.constexpr = LAYOUT.partition // 32
    score = tl.zeros((W, 16, N), tl.float32)
    for p in tl.static_range(tl.constexpr(LAYOUT.groups)):
        scale, minimum = load_unit(record + LAYOUT.k_meta, p * token_tiles + m, W)
        for step in tl.static_range(steps):
            tile = tiles[m // row_fields * across + (p * steps + step) // column_fields]
            k = values(tile, scale, minimum, (p * steps) % column_fields * row_fields + m % row_fields, bits, W)
            score = tl.dot(k, query[p * steps + step], score)
    return score


@triton.jit
def channel_outputs(out, record, tiles, weights, LAYOUT: tl.constexpr, m: tl.constexpr, W: tl.constexpr):
    """Outputs of channel tile `m` with P·V of this page added."""
    across: tl.constexpr = LAYOUT.v_tiles.across
    fields: tl.constexpr = LAYOUT.v_tiles.fields
    scale, minimum = load_unit(record + LAYOUT.v_meta, m, W)
    for c in tl.static_range(across):
        v = values(tiles[m // fields * across + c], scale, minimum, m % fields, LAYOUT.v_tiles.bits, W)
        out = tl.dot(v, weights[c], out)
    return out


@triton.jit
def add_values(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages at `record` [W] added to the running softmax."""
    top, weight, out = state
    k_count: tl.constexpr = LAYOUT.k_tiles.stored
    v_count: tl.constexpr = LAYOUT.v_tiles.stored
    token_tiles: tl.constexpr = LAYOUT.page_tokens // 16
    tiles = ()
    for i in tl.static_range(k_count):
        tiles = tiles + (load_paired_tile(record, i, W),)
    scores = ()
    for m in tl.static_range(token_tiles):
        scores = scores + (tile_scores(record, tiles, query, LAYOUT, m, W, N),)
    highest = scores[0]
    for m in tl.static_range(1, token_tiles):
        highest = tl.maximum(highest, scores[m])
    page_top = tl.where(valid[:, None], tl.max(highest, 1), LOWEST)
    new_top = tl.maximum(top, page_top)
    kept = tl.exp2(top - new_top)
    weight = doubled(weight * kept[:, None, :], W, N)
    base = tl.where(valid[:, None], new_top, -LOWEST)[:, None, :]  # invalid pages get weights of 0
    ones = tl.full((W, 16, 32), 1.0, tl.float16)
    weights = ()
    for c in tl.static_range(token_tiles // 2):
        low = tl.exp2(scores[2 * c] - base).to(tl.float16)
        high = tl.exp2(scores[2 * c + 1] - base).to(tl.float16)
        both = tl.reshape(tl.permute(tl.join(low, high), (0, 3, 1, 2)), (W, 2, 2, 8, N))
        both = tl.reshape(tl.permute(both, (0, 1, 3, 2, 4)), (W, 2, 4, 2, 2, N))  # zipped order
        w = tl.reshape(tl.permute(both, (0, 1, 3, 2, 4, 5)), (W, 32, N))
        weight = tl.dot(ones, w, weight)
        weights = weights + (w,)
    tiles = ()
    for i in tl.static_range(v_count):
        tiles = tiles + (load_paired_tile(record + LAYOUT.v_codes, i, W),)
    added = ()
    for m in tl.static_range(tl.constexpr(LAYOUT.v_units)):
        added = added + (channel_outputs(out[m] * kept[:, None, :], record, tiles, weights, LAYOUT, m, W),)
    return new_top, equal_halves(weight, W, N), added


def attn_decode_dequantized(fmt: HackFormat, pool: Pool, spans: Spans, q: Tensor, workspace: Workspace) -> Tensor:
    """`decode.attn_decode` with codes dequantized to FP16 values."""
    check_records(fmt, pool.planes)
    q = rows_of_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dequantize_launch(fmt, pool, spans, q, out, workspace).run()
    return out


def dequantize_launch(
    fmt: HackFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    layout = page_layout(fmt)
    reader = PageReader(half_query, add_values, layout)
    records = pool.planes["k_codes"]
    return paged_launch(reader, records, records, pool, spans, q, out, workspace)
