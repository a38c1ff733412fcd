"""Prompts over pages of small floating-point numbers: numbers times their scales, FP32 in registers as the definition
has them. TF32 holds them exactly but for a gain."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.float_format import FloatFormat
from hack_kernels.triton.float_layout import FP16_MANTISSA, float_layout, page_factor, row_scales
from hack_kernels.triton.prefill import PromptReader
from hack_kernels.triton.prefill_read import add_read_page, read_query_rows, read_tiling

MANTISSA = tl.constexpr(FP16_MANTISSA)


@triton.jit
def float_codes(side, row, channel, inside, LAYOUT: tl.constexpr):
    """Codes INT32 [rows, channels]; 0 past the matrix."""
    D: tl.constexpr = LAYOUT.head_dim
    LOW: tl.constexpr = LAYOUT.low_bits
    at = side + (row // (8 // LOW))[:, None] * D + channel[None, :]
    codes = tl.load(at, mask=inside, other=0).to(tl.int32)
    if LOW < 8:
        codes = (codes >> (row % 2 * 4)[:, None]) & 0x0F
    if LAYOUT.bits > LOW:
        at = side + LAYOUT.high + (row // 4)[:, None] * D + channel[None, :]
        high = tl.load(at, mask=inside, other=0).to(tl.int32)
        codes |= ((high >> (row % 4 * 2)[:, None]) & 0x03) << 4
    return codes


@triton.jit
def float_values(record, OF_V: tl.constexpr, row, first, CHANNELS: tl.constexpr, LAYOUT: tl.constexpr):
    """What the codes of rows of K or V stand for, in channels from `first` on: FP32 [rows, CHANNELS], 0 past D."""
    side = record + LAYOUT.side_bytes if OF_V else record
    ROWS: tl.constexpr = row.shape[0]
    BITS: tl.constexpr = LAYOUT.bits
    channel = first + tl.arange(0, CHANNELS)
    inside = (row >= 0)[:, None] & (channel < LAYOUT.head_dim)[None, :]
    codes = float_codes(side, row, channel, inside, LAYOUT)
    sized = (codes & ((1 << (BITS - 1)) - 1)) << (MANTISSA - LAYOUT.mantissa_bits)
    halves = (((codes >> (BITS - 1)) << 15) | sized).to(tl.int16).to(tl.float16, bitcast=True)
    values = halves.to(tl.float32) * LAYOUT.unit
    if LAYOUT.row_scales > 0:
        BLOCKS: tl.constexpr = CHANNELS // LAYOUT.block
        block = first // LAYOUT.block + tl.arange(0, BLOCKS)
        at = side + LAYOUT.scale + row[:, None] * LAYOUT.row_scales + block[None, :]
        seen = (row >= 0)[:, None] & (block < LAYOUT.row_scales)[None, :]
        scales = row_scales(tl.load(at, mask=seen, other=0), LAYOUT)
        if LAYOUT.twofold:
            scales *= page_factor(side, LAYOUT)
        spread = tl.broadcast_to(scales[:, :, None], (ROWS, BLOCKS, LAYOUT.block))
        values *= tl.reshape(spread, (ROWS, CHANNELS))
    else:
        values *= page_factor(side, LAYOUT)
    return values


@triton.jit
def add_float_page(state, query, record, first_block, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """A page added to the running softmax."""
    return add_read_page(state, query, record, first_block, float_values, TILING, LAYOUT)


def float_prompt_reader(fmt: FloatFormat) -> PromptReader:
    """For queries of 16 bits."""
    layout = float_layout(fmt)
    return PromptReader(read_query_rows, add_float_page, layout, read_tiling(fmt.head_dim), records="k")
