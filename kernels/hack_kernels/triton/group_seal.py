"""Full pages to integer codes in groups, by the arithmetic of `hack_kernels/quantize.py`, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool
from hack_kernels.group_format import GroupFormat
from hack_kernels.triton.float_seal import WARPS, load_some, store_bytes
from hack_kernels.triton.group_layout import group_layout, halves_at
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.quantize import scale_of

V_ROWS = tl.constexpr(32)
"""Rows of V that are quantized at once. For K it is a group of rows."""


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
        channel = tl.arange(0, D_PAD)
        for first in range(0, PI, K.group):
            x = load_some(k + begin, first + tl.arange(0, K.group), LAYOUT, D_PAD).to(tl.float32)
            codes, low, scale = group_codes(x, 0, K.levels)
            at = first // K.group * D + channel
            tl.store(halves_at(record, K.scale) + at, scale, mask=channel < D)
            tl.store(halves_at(record, K.minimum) + at, low.to(tl.float16), mask=channel < D)
            rows = first * K.bits // 8 + tl.arange(0, K.group * K.bits // 8)
            store_bytes(record + K.begin, rows, packed_rows(codes, K.bits), LAYOUT, D_PAD)
    else:
        BLOCKS: tl.constexpr = D_PAD // V.group
        block = tl.arange(0, BLOCKS)[None, :]
        for first in range(0, PI, V_ROWS):
            row = first + tl.arange(0, V_ROWS)
            x = load_some(v + begin, row, LAYOUT, D_PAD).to(tl.float32)
            codes, low, scale = group_codes(tl.reshape(x, (V_ROWS, BLOCKS, V.group)), 2, V.levels)
            at, seen = row[:, None] * (D // V.group) + block, (block < D // V.group) & (row >= 0)[:, None]
            tl.store(halves_at(record, V.scale) + at, scale, mask=seen)
            tl.store(halves_at(record, V.minimum) + at, low.to(tl.float16), mask=seen)
            rows = first * V.bits // 8 + tl.arange(0, V_ROWS * V.bits // 8)
            packed = packed_rows(tl.reshape(codes, (V_ROWS, D_PAD)), V.bits)
            store_bytes(record + V.begin, rows, packed, LAYOUT, D_PAD)


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
