"""Full pages of FP16 rows to records of levels, bit-equal to the definition in `level_format.py`.

The definition fixes the order of sums over channels, so a lane takes one token, channel after channel. Codes pass
through memory, a byte each, on their way from that order to the order at rest. Under feedback every level changes the
values wanted of the channels before it. So levels are chosen one after another, for 16 tokens at a time, with channels
across lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool
from hack_kernels.level_format import FITS, REFITS, TINY, Feedback, LevelFormat
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.level_layout import level_layout
from hack_kernels.triton.level_scales import byte_of_half, half_of_byte, load_row_scales, store_row_scales
from hack_kernels.triton.tiles import store_codes, zipped

TIMES = tl.constexpr(FITS)
AGAIN = tl.constexpr(REFITS)
LEAST = tl.constexpr(TINY)
MOST = tl.constexpr(65504.0)
TOKENS_AT_ONCE = tl.constexpr(16)
"""Tokens whose levels are chosen at once under feedback."""


@triton.jit
def level(x, ZERO: tl.constexpr):
    """The nearest of ±1/2, ±3/2, .. ±ZERO."""
    return tl.minimum(tl.maximum(tl.floor(x) + 0.5, -ZERO), ZERO)


@triton.jit
def inverse_of(scale):
    """1 / scale, correctly rounded."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def stored(scale, NARROW: tl.constexpr):
    """A scale rounded to its stored form, FP16."""
    half = tl.minimum(tl.maximum(scale, LEAST), MOST).to(tl.float16)
    return half_of_byte(byte_of_half(half)) if NARROW else half


@triton.jit
def eight(x):
    """[T, 8] as a tuple of eight [T]. One lane has all eight numbers of a row."""
    split = tl.reshape(x, (x.shape[0], 2, 2, 2))
    even, odd = tl.split(split)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a, e = tl.split(first)
    b, f = tl.split(second)
    c, g = tl.split(third)
    d, h = tl.split(fourth)
    return a, b, c, d, e, f, g, h


@triton.jit
def fitted_scale(rows, SIDE: tl.constexpr, D: tl.constexpr):
    """The scale FP32 [T] of rows at `rows` [T] by alternate least squares, before it is rounded."""
    channel = tl.arange(0, 8)[None, :]
    none = tl.zeros(rows.shape, tl.float32)
    squares = none
    for block in range(D // 8):
        x = eight(tl.load(rows[:, None] + (block * 8 + channel)).to(tl.float32))
        for i in tl.static_range(8):
            squares += x[i] * x[i]
    mean = tl.div_rn(squares, tl.full(rows.shape, D, tl.float32))
    scale = tl.maximum(tl.sqrt_rn(mean) * SIDE.step, LEAST)
    for _ in tl.static_range(TIMES):
        steps, dots, norm = inverse_of(scale), none, none
        for block in range(D // 8):
            x = eight(tl.load(rows[:, None] + (block * 8 + channel)).to(tl.float32))
            for i in tl.static_range(8):
                nearest = level(x[i] * steps, SIDE.zero)
                dots += nearest * x[i]
                norm += nearest * nearest
        scale = tl.maximum(tl.div_rn(dots, norm), LEAST)
    return scale


@triton.jit
def plain_codes(rows, codes, scale, SIDE: tl.constexpr, D: tl.constexpr):
    """Codes of rows at `rows` [T] by their scales [T], a byte each, to `codes` [T]."""
    channel = tl.arange(0, 8)[None, :]
    steps = inverse_of(scale)
    for block in range(D // 8):
        x = tl.load(rows[:, None] + (block * 8 + channel)).to(tl.float32)
        found = level(x * steps[:, None], SIDE.zero) + SIDE.zero
        tl.store(codes[:, None] + (block * 8 + channel), found.to(tl.uint8))


@triton.jit
def fed_codes(rows, codes, scale, gains, weights, SIDE: tl.constexpr, D: tl.constexpr):
    """Codes of rows at `rows` [T] under feedback, a byte each, to `codes` [T]. `scale` FP32 [T] is the scale before
    feedback; the scale after it is returned, FP16. `gains` [D, D]: at [i, d] the gain of channel d by i, 1 on the
    diagonal."""
    channel = tl.arange(0, triton.next_power_of_2(D))
    inside = channel < D
    none = tl.zeros(rows.shape, tl.float32)
    felt = none[:, None] + tl.zeros(channel.shape, tl.float32)[None, :]
    zeros = felt
    for back in range(D):
        i = D - 1 - back
        x = tl.load(rows + i).to(tl.float32)
        felt += x[:, None] * tl.load(gains + i * D + channel, mask=inside, other=0.0)[None, :]
    for refit in tl.static_range(AGAIN + 1):
        steps, dots, norm, whole = inverse_of(scale), none, none, zeros
        for back in range(D):
            d = D - 1 - back
            here = (channel == d)[None, :]
            wanted = tl.sum(tl.where(here, felt, 0.0), axis=1)
            before = tl.sum(tl.where(here, whole, 0.0), axis=1)
            nearest = level(wanted * steps - before, SIDE.zero)
            whole += nearest[:, None] * tl.load(gains + d * D + channel, mask=inside, other=0.0)[None, :]
            if refit < AGAIN:
                after = before + nearest
                weighted = tl.load(weights + d) * after
                dots += weighted * wanted
                norm += weighted * after
            else:
                tl.store(codes + d, (nearest + SIDE.zero).to(tl.uint8))
        if refit < AGAIN:
            scale = stored(tl.div_rn(dots, norm), SIDE.narrow).to(tl.float32)
    return scale.to(tl.float16)


@triton.jit
def pack_plane(codes, rest, SHIFT: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Bits SHIFT.. of code bytes, ROW bytes from row to row and COLUMN from column to column, to stored tiles."""
    HEIGHT: tl.constexpr = TILE.field_rows
    local = tl.arange(0, HEIGHT)[:, None]
    for across in range(TILE.across):
        packed = tl.zeros((HEIGHT, 32), tl.int32)
        for field in tl.static_range(tl.constexpr(TILE.fields)):
            row = (local // 16 * TILE.row_fields + field % TILE.row_fields) * 16 + local % 16
            column = (across * TILE.column_fields + field // TILE.row_fields) * 32 + tl.arange(0, 32)[None, :]
            column = zipped(column) if TILE.zipped else column
            seen = (row < TILE.rows) & (column < TILE.columns)
            found = tl.load(codes + (row * ROW + column * COLUMN), mask=seen, other=0).to(tl.int32)
            packed |= ((found >> SHIFT) & TILE.levels) << (TILE.bits * field)
        store_codes(rest, packed, across, TILE, 1)


@triton.jit
def seal_side(
    rows, codes, record, token_stride, gains, weights, FED: tl.constexpr, SIDE: tl.constexpr, OF_K: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Seals K or V of one page of one KV head. Barriers precede reads of what other threads wrote."""
    PI: tl.constexpr = LAYOUT.page_tokens
    D: tl.constexpr = LAYOUT.head_dim
    token = tl.arange(0, PI)
    scales = record + SIDE.scale
    scale = fitted_scale(rows + token * token_stride, SIDE, D)
    if FED:
        store_row_scales(scales, token, stored(scale * SIDE.stretch, SIDE.narrow), SIDE.narrow)
        tl.debug_barrier()
        for first in range(0, PI, TOKENS_AT_ONCE):
            some = first + tl.arange(0, TOKENS_AT_ONCE)
            begin = load_row_scales(scales, some, SIDE.narrow)
            half = fed_codes(rows + some * token_stride, codes + some * D, begin, gains, weights, SIDE, D)
            store_row_scales(scales, some, half, SIDE.narrow)
    else:
        half = stored(scale, SIDE.narrow)
        store_row_scales(scales, token, half, SIDE.narrow)
        plain_codes(rows + token * token_stride, codes + token * D, half.to(tl.float32), SIDE, D)
    tl.debug_barrier()
    LOW: tl.constexpr = SIDE.low
    TOP: tl.constexpr = SIDE.top
    ROW: tl.constexpr = D if OF_K else 1
    COLUMN: tl.constexpr = 1 if OF_K else D
    pack_plane(codes, record + SIDE.codes, 0, LOW, ROW, COLUMN)
    if SIDE.split:
        pack_plane(codes, record + SIDE.high, 2, TOP, ROW, COLUMN)


@triton.jit(do_not_specialize=["head_start"])
def level_seal_kernel(
    k,
    v,
    page_ids,
    records,
    codes,
    gains,
    weights,
    page_stride,
    row_stride,
    head_stride,
    token_stride,
    head_start,
    FED: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Grid (pages, KV heads, 2): K or V of one page of one head. `codes` is room for bytes [pages, heads, 2, Π, D].
    Gains and weights are those of all the model's heads; head 0 here is head `head_start`."""
    D: tl.constexpr = LAYOUT.head_dim
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    page, head, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    record = records + tl.load(page_ids + page) * page_stride + head * LAYOUT.nbytes
    at = page.to(tl.int64) * row_stride + head * head_stride
    room = codes + ((page.to(tl.int64) * tl.num_programs(1) + head) * 2 + side) * (LAYOUT.page_tokens * D)
    if side == 0:
        of_head = (head_start + head) * D
        more, felt = gains + of_head * D, weights + of_head
        seal_side(k + at, room, record, token_stride, more, felt, FED, K, True, LAYOUT)
    else:
        seal_side(v + at, room, record, token_stride, gains, weights, False, V, False, LAYOUT)


def columns_first(feedback: Feedback) -> Feedback:
    """Feedback as the kernel reads it: gains [heads, i, d] of channel d by i, with 1 on the diagonal."""
    gains = feedback.gains + torch.eye(feedback.gains.shape[-1], device=feedback.gains.device)
    return Feedback(gains.mT.contiguous(), feedback.weights.contiguous())


def seal_levels(
    fmt: LevelFormat, pool: Pool, page_ids: Tensor, k: Tensor, v: Tensor, feedback: Feedback | None
) -> None:
    """Quantize k, v [P, Hkv, Π, D] FP16 into the records of `page_ids` of a pool; checks are the caller's."""
    level_seal_launch(fmt, pool, page_ids, k.contiguous(), v.contiguous(), feedback).run()


def level_seal_launch(
    fmt: LevelFormat, pool: Pool, page_ids: Tensor, k: Tensor, v: Tensor, feedback: Feedback | None
) -> Launch:
    """The launch of `seal_levels`; k and v are contiguous, `feedback` comes from `columns_first`. It uses no fused
    multiply-adds, so that it rounds as the definition does."""
    records = pool.planes["k_codes"]
    codes = torch.empty((*k.shape[:2], 2, *k.shape[2:]), dtype=torch.uint8, device=k.device)
    arguments = {
        "k": k,
        "v": v,
        "page_ids": page_ids,
        "records": records,
        "codes": codes,
        "gains": codes if feedback is None else feedback.gains,
        "weights": codes if feedback is None else feedback.weights,
        "page_stride": records.stride(0),
        "row_stride": k.stride(0),
        "head_stride": k.stride(1),
        "token_stride": k.stride(2),
        "head_start": pool.head_start,
        "FED": feedback is not None,
        "LAYOUT": level_layout(fmt),
    }
    warps = 4 if feedback is not None else fmt.page_tokens // 32
    return Launch(level_seal_kernel, (page_ids.numel(), k.shape[1], 2), arguments, warps, fusion=False)
