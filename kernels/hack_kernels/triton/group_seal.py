"""Full pages to integer codes in groups, by the arithmetic of `hack_kernels/quantize.py`, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool
from hack_kernels.group_format import GroupFormat
from hack_kernels.triton.float_seal import ROUND, WARPS, load_some, store_bytes
from hack_kernels.triton.group_layout import group_layout, halves_at
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.quantize import scale_of

SOME_ROWS = tl.constexpr(32)
"""Rows that are quantized at once, where groups lie in rows. Else it is a group of rows."""
ROUND_BITS = tl.constexpr(0x4B400000)
"""The bits of `ROUND`. Those of an integer plus `ROUND` are these plus the integer."""


@triton.jit
def group_codes(x, AXIS: tl.constexpr, LEVELS: tl.constexpr):
    """Codes INT32 of groups along an axis of FP32 x, and the groups' FP32 minima and FP16 scales, without that axis."""
    x = tl.where(x == 0.0, 0.0, x)  # +0 in place of -0
    low = tl.min(x, AXIS)
    scale = scale_of(low, tl.max(x, AXIS), LEVELS)
    lows = tl.broadcast_to(tl.expand_dims(low, AXIS), x.shape)
    scales = tl.broadcast_to(tl.expand_dims(scale.to(tl.float32), AXIS), x.shape)
    steps = tl.div_rn(x - lows, scales) + 0.5
    return tl.minimum(steps, LEVELS).to(tl.int32), low, scale  # steps are not negative: truncation rounds down


@triton.jit
def packed_rows(codes, BITS: tl.constexpr):
    """Codes [R, C] -> bytes INT32 [R·BITS/8, C]: consecutive rows share a byte."""
    TOGETHER: tl.constexpr = 8 // BITS
    split = tl.reshape(codes, (codes.shape[0] // TOGETHER, TOGETHER, codes.shape[1]))
    return tl.sum(split << (tl.arange(0, TOGETHER) * BITS)[None, :, None], 1)


@triton.jit
def seal_by_channel(record, rows, SIDE: tl.constexpr, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """A page whose groups lie along the rows of a channel."""
    D: tl.constexpr = LAYOUT.head_dim
    channel = tl.arange(0, D_PAD)
    for first in range(0, LAYOUT.page_tokens, SIDE.group):
        x = load_some(rows, first + tl.arange(0, SIDE.group), LAYOUT, D_PAD).to(tl.float32)
        codes, low, scale = group_codes(x, 0, SIDE.levels)
        at = first // SIDE.group * D + channel
        tl.store(halves_at(record, SIDE.scale) + at, scale, mask=channel < D)
        tl.store(halves_at(record, SIDE.minimum) + at, low.to(tl.float16), mask=channel < D)
        at = first * SIDE.bits // 8 + tl.arange(0, SIDE.group * SIDE.bits // 8)
        store_bytes(record + SIDE.begin, at, packed_rows(codes, SIDE.bits), LAYOUT, D_PAD)


@triton.jit
def seal_by_row(record, rows, SIDE: tl.constexpr, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """A page whose groups lie along the channels of a row."""
    BLOCKS: tl.constexpr = D_PAD // SIDE.group
    block = tl.arange(0, BLOCKS)[None, :]
    OF_ROW: tl.constexpr = LAYOUT.head_dim // SIDE.group
    for first in range(0, LAYOUT.page_tokens, SOME_ROWS):
        row = first + tl.arange(0, SOME_ROWS)
        x = load_some(rows, row, LAYOUT, D_PAD).to(tl.float32)
        codes, low, scale = group_codes(tl.reshape(x, (SOME_ROWS, BLOCKS, SIDE.group)), 2, SIDE.levels)
        at, seen = row[:, None] * OF_ROW + block, (block < OF_ROW) & (row >= 0)[:, None]
        tl.store(halves_at(record, SIDE.scale) + at, scale, mask=seen)
        tl.store(halves_at(record, SIDE.minimum) + at, low.to(tl.float16), mask=seen)
        at = first * SIDE.bits // 8 + tl.arange(0, SOME_ROWS * SIDE.bits // 8)
        packed = packed_rows(tl.reshape(codes, (SOME_ROWS, D_PAD)), SIDE.bits)
        store_bytes(record + SIDE.begin, at, packed, LAYOUT, D_PAD)


@triton.jit
def seal_centred(record, rows, SIDE: tl.constexpr, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """A page of K or V to codes around zero, each row with its largest magnitude as scale."""
    for first in range(0, LAYOUT.page_tokens, SOME_ROWS):
        row = first + tl.arange(0, SOME_ROWS)
        x = load_some(rows, row, LAYOUT, D_PAD).to(tl.float32)
        largest = tl.max(tl.abs(x), 1)
        largest = tl.where(largest == 0.0, 1.0, largest)
        tl.store(halves_at(record, SIDE.scale) + row, largest.to(tl.float16))
        steps = tl.div_rn(x * SIDE.centre, tl.broadcast_to(largest[:, None], x.shape))
        codes = (steps + ROUND).to(tl.int32, bitcast=True) - (ROUND_BITS - SIDE.centre)
        low = packed_rows(codes & ((1 << SIDE.low_bits) - 1), SIDE.low_bits)
        at = first * SIDE.low_bits // 8 + tl.arange(0, low.shape[0])
        store_bytes(record + SIDE.begin, at, low, LAYOUT, D_PAD)
        if SIDE.bits > SIDE.low_bits:
            high = packed_rows(codes >> SIDE.low_bits, SIDE.bits - SIDE.low_bits)
            at = first * (SIDE.bits - SIDE.low_bits) // 8 + tl.arange(0, high.shape[0])
            store_bytes(record + SIDE.high, at, high, LAYOUT, D_PAD)


@triton.jit
def group_seal_kernel(k, v, page_ids, records, page_stride, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """Grid (pages, KV heads, 2): K or V of one page of one head; k and v [pages, KV heads, Π, D] are contiguous."""
    page, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    record = records + tl.load(page_ids + page) * page_stride + head * LAYOUT.nbytes
    begin = (page.to(tl.int64) * heads + head) * (PI * D)
    if tl.program_id(2) == 0:
        if K.centre:
            seal_centred(record, k + begin, K, LAYOUT, D_PAD)
        else:
            seal_by_channel(record, k + begin, K, LAYOUT, D_PAD)
    elif V.centre:
        seal_centred(record, v + begin, V, LAYOUT, D_PAD)
    else:
        seal_by_row(record, v + begin, V, LAYOUT, D_PAD)


def group_seal_launch(fmt: GroupFormat, pool: Pool, page_ids: Tensor, k: Tensor, v: Tensor) -> Launch:
    """The launch that seals k, v [P, Hkv, Π, D] FP16, contiguous. It uses no fused multiply-adds, so that it rounds as
    the definition does."""
    records = pool.planes["k_codes"]
    arguments = {
        "k": k,
        "v": v,
        "page_ids": page_ids,
        "records": records,
        "page_stride": records.stride(0),
        "LAYOUT": group_layout(fmt),
        "D_PAD": triton.next_power_of_2(fmt.head_dim),
    }
    return Launch(group_seal_kernel, (page_ids.numel(), k.shape[1], 2), arguments, WARPS, fusion=False)
