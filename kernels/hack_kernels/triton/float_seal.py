"""Full pages to small floating-point numbers, by the arithmetic of `reference/floats.py`, to the bit.

Torch on a GPU multiplies by the reciprocal of a constant instead of dividing by it, so its bytes would differ.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool
from hack_kernels.float_format import Element, FloatFormat
from hack_kernels.triton.float_layout import float_layout, row_scales
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.quantize import divided

ROWS_AT_ONCE = tl.constexpr(32)
"""Rows of a page that are quantized at once."""
ROUND = tl.constexpr(12582912.0)
"""1.5·2^23: added to a small FP32, its low byte is the nearest integer, ties to even."""
E4M3_LARGEST = tl.constexpr(Element.E4M3.largest)
E4M3_FINITE = tl.constexpr(Element.E4M3.finite)
WARPS = 4


@triton.jit
def encoded(size, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, FINITE: tl.constexpr):
    """Codes INT32 without a sign of FP32 numbers that have none: to nearest, ties to the even code, saturating.

    A number is rounded to a count of its binade's last place. Its code is the first code of the binade below plus that
    count.
    """
    LEAST: tl.constexpr = 2 - (1 << (EXPONENT_BITS - 1))  # exponent of the least normal number
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, LEAST)
    per_place = ((127 + MANTISSA_BITS - exponent) << 23).to(tl.float32, bitcast=True)
    places = (size * per_place + ROUND).to(tl.int32, bitcast=True) & 0xFF
    return tl.minimum(places + ((exponent - LEAST) << MANTISSA_BITS), FINITE - 1)


@triton.jit
def load_some(rows, row, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """FP16 rows [R, D_PAD], 0 past D."""
    channel = tl.arange(0, D_PAD)
    seen = (row >= 0)[:, None] & (channel < LAYOUT.head_dim)[None, :]
    return tl.load(rows + row[:, None] * LAYOUT.head_dim + channel[None, :], mask=seen, other=0.0)


@triton.jit
def largest_of_page(rows, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """The largest magnitude of one page, FP32."""
    found = tl.zeros((ROWS_AT_ONCE, D_PAD), tl.float32)
    for first in range(0, LAYOUT.page_tokens, ROWS_AT_ONCE):
        x = load_some(rows, first + tl.arange(0, ROWS_AT_ONCE), LAYOUT, D_PAD)
        found = tl.maximum(found, tl.abs(x.to(tl.float32)))
    return tl.max(tl.max(found, 1), 0)


@triton.jit
def page_step(largest, LAYOUT: tl.constexpr):
    """The scale of a page, or its gain, FP32 [1]; a scale is rounded up, so that nothing saturates."""
    whole = tl.full((1,), 0.0, tl.float32) + largest
    if LAYOUT.twofold:
        step = divided(whole, E4M3_LARGEST * LAYOUT.largest)
    else:
        step = divided(whole, LAYOUT.largest)
        low = step * LAYOUT.largest < whole
        step = (step.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(step == 0.0, 1.0, step)


@triton.jit
def block_scales(largest, gain, LAYOUT: tl.constexpr):
    """Bytes of the scales of blocks [R, B] whose largest magnitudes are `largest` FP32, and the blocks' divisors, 0
    where codes are 0."""
    if LAYOUT.power:
        # The exponent of the largest element is that of its last binade.
        EXPONENT: tl.constexpr = (LAYOUT.finite - 1 >> LAYOUT.mantissa_bits) - (1 << (LAYOUT.exponent_bits - 1)) + 1
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - EXPONENT
        bytes_of = tl.where(largest == 0.0, 0, tl.minimum(tl.maximum(exponent, 0), 254)).to(tl.uint8)
        steps = row_scales(bytes_of, LAYOUT)
    else:
        most = tl.broadcast_to(gain * LAYOUT.largest, largest.shape)
        bytes_of = encoded(tl.div_rn(largest, most), 4, 3, E4M3_FINITE).to(tl.uint8)
        steps = row_scales(bytes_of, LAYOUT) * gain
    return bytes_of, steps


@triton.jit
def codes_of_rows(side, rows, row, gain, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """Codes INT32 [R, D_PAD] of some rows; scales of blocks are written on the way."""
    x = load_some(rows, row, LAYOUT, D_PAD)
    size, negative = tl.abs(x.to(tl.float32)), x.to(tl.int16, bitcast=True) < 0
    R: tl.constexpr = row.shape[0]
    BITS: tl.constexpr = LAYOUT.bits
    if LAYOUT.row_scales > 0:
        BLOCK: tl.constexpr = LAYOUT.block
        BLOCKS: tl.constexpr = D_PAD // BLOCK
        sizes = tl.reshape(size, (R, BLOCKS, BLOCK))
        bytes_of, steps = block_scales(tl.max(sizes, 2), tl.broadcast_to(gain[None, :], (R, BLOCKS)), LAYOUT)
        block = tl.arange(0, BLOCKS)[None, :]
        at = side + LAYOUT.scale + row[:, None] * LAYOUT.row_scales + block
        tl.store(at, bytes_of, mask=(block < LAYOUT.row_scales) & (row >= 0)[:, None])
        divisors = tl.broadcast_to(tl.where(steps == 0.0, 1.0, steps)[:, :, None], (R, BLOCKS, BLOCK))
        sizes = tl.where((steps == 0.0)[:, :, None], 0.0, tl.div_rn(sizes, divisors))
        size = tl.reshape(sizes, (R, D_PAD))
    else:
        size = tl.div_rn(size, tl.broadcast_to(gain[None, :], (R, D_PAD)))
    codes = encoded(size, LAYOUT.exponent_bits, LAYOUT.mantissa_bits, LAYOUT.finite)
    return codes | (negative.to(tl.int32) << (BITS - 1))


@triton.jit
def store_bytes(plane, row, packed, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """Rows of bytes [R, D_PAD] of a plane of codes."""
    channel = tl.arange(0, D_PAD)[None, :]
    seen = (channel < LAYOUT.head_dim) & (row >= 0)[:, None]
    tl.store(plane + row[:, None] * LAYOUT.head_dim + channel, packed.to(tl.uint8), mask=seen)


@triton.jit
def float_seal_kernel(k, v, page_ids, records, page_stride, LAYOUT: tl.constexpr, D_PAD: tl.constexpr):
    """Grid (pages, KV heads, 2): K or V of one page of one head; k and v [pages, KV heads, Π, D] are contiguous."""
    page, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    SIX: tl.constexpr = LAYOUT.low_bits < LAYOUT.bits
    TOGETHER: tl.constexpr = 4 if SIX else 8 // LAYOUT.bits  # rows that share a byte of some plane
    R: tl.constexpr = ROWS_AT_ONCE // TOGETHER
    side = records + tl.load(page_ids + page) * page_stride + head * LAYOUT.nbytes
    rows = k if tl.program_id(2) == 0 else v
    side += tl.program_id(2) * LAYOUT.side_bytes
    rows += (page.to(tl.int64) * heads + head) * (PI * D)
    gain = tl.full((1,), 1.0, tl.float32)
    if not LAYOUT.power:
        gain = page_step(largest_of_page(rows, LAYOUT, D_PAD), LAYOUT)
        at = (side + LAYOUT.gain).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(at + tl.arange(0, 1), gain)
    for first in range(0, PI // TOGETHER, R):
        byte_row = first + tl.arange(0, R)
        low = tl.zeros((R, D_PAD), tl.int32)
        high = tl.zeros((R, D_PAD), tl.int32)
        for i in tl.static_range(TOGETHER):
            codes = codes_of_rows(side, rows, byte_row * TOGETHER + i, gain, LAYOUT, D_PAD)
            if SIX:
                high |= (codes >> 4) << (2 * i)
                low |= (codes & 0x0F) << (4 * (i % 2))
                if i % 2 == 1:
                    store_bytes(side, byte_row * 2 + i // 2, low, LAYOUT, D_PAD)
                    low = tl.zeros((R, D_PAD), tl.int32)
            else:
                low |= codes << (LAYOUT.bits * i)
        if SIX:
            store_bytes(side + LAYOUT.high, byte_row, high, LAYOUT, D_PAD)
        else:
            store_bytes(side, byte_row, low, LAYOUT, D_PAD)


def float_seal_launch(fmt: FloatFormat, pool: Pool, page_ids: Tensor, k: Tensor, v: Tensor) -> Launch:
    """The launch that seals k, v [P, Hkv, Π, D] FP16, contiguous. It uses no fused multiply-adds, so that it rounds as
    the definition does."""
    records = pool.planes["k"]
    arguments = {
        "k": k,
        "v": v,
        "page_ids": page_ids,
        "records": records,
        "page_stride": records.stride(0),
        "LAYOUT": float_layout(fmt),
        "D_PAD": triton.next_power_of_2(fmt.head_dim),
    }
    # With four warps the kernel of 6 bits spilled at head_dim 96 on sm_90.
    warps = 2 * WARPS if fmt.element.bits == 6 and fmt.head_dim > 64 else WARPS
    return Launch(float_seal_kernel, (page_ids.numel(), k.shape[1], 2), arguments, warps, fusion=False)
