"""Decode over pages of small floating-point numbers: codecs `fp8`, `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`.

Codes become FP16 in registers (`float_layout.py`) and are multiplied there. FP16 holds every element exactly. In Q·K a
block's scale multiplies the product, because the channels of a step share it. In P·V it multiplies the weights before
the product, because a row has one scale for all channels of a block. The largest scale of 16 rows is taken out first,
so that weights keep their precision in FP16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.float_format import FloatFormat
from hack_kernels.triton.float_layout import float_layout, page_factor, row_scales, widened
from hack_kernels.triton.float_query import ROWS_AT_ONCE, product, rounded_query, weights_of
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import ALL_REGISTERS, REGISTERS, PageReader, paged_launch
from hack_kernels.triton.split import Workspace

NARROW = 64
"""Up to this head_dim three programs fit a multiprocessor without spills; wider pages take all registers."""
WEIGHT_UNIT = tl.constexpr(32768.0)
"""Scaled weights are at most this: FP16 then holds them to 2^-39 of the largest."""
SMALLEST = tl.constexpr(2.0**-100)
"""Replaces smaller scales as divisors. In pages made of FP16 rows only blocks of zeros have smaller scales."""


@triton.jit
def load_bytes(plane, row, channel, D: tl.constexpr):
    """Bytes [W, rows, channels] of a plane that begins at `plane` [W]."""
    return tl.load(plane[:, None, None] + (row[:, None] * D + channel[None, :])[None, :, :])


@triton.jit
def load_halves(side, first, channel, LAYOUT: tl.constexpr):
    """16 rows from `first` on of pages at `side` [W], at some channels, as FP16 over `unit`: two of [W, 8, channels].

    Codes of 4 or 6 bits share bytes with those of the next row, so the first has even rows and the second odd ones
    (`row_of`). Eight rows of bytes are one load of a warp.
    """
    D: tl.constexpr = LAYOUT.head_dim
    row = tl.arange(0, 8)
    codes = load_bytes(side, first // 2 + row, channel, D)
    if LAYOUT.bits == 4:
        top, bottom = widened(codes, True, LAYOUT), widened(codes, False, LAYOUT)
    else:
        high = load_bytes(side + LAYOUT.high, first // 4 + row // 2, channel, D)
        high = high >> (row % 2 * 4).to(tl.uint8)[None, :, None]
        top = widened(((codes & 0x0F) << 2) | (high << 6), False, LAYOUT)
        bottom = widened(((codes & 0xF0) >> 2) | ((high & 0x0C) << 4), False, LAYOUT)
    return top, bottom


@triton.jit
def in_operand_order(top, bottom, COLUMNS: tl.constexpr, W: tl.constexpr):
    """Two of [W, 8, COLUMNS] as [W, 16, COLUMNS], channels as `rounded_query` has them: a lane holds its operands."""
    # row, quad, product, half, one, half of the rows
    split = tl.reshape(tl.join(top, bottom), (W, 8, 4, COLUMNS // 16, 2, 2, 2))
    return tl.reshape(tl.permute(split, (0, 6, 1, 3, 4, 2, 5)), (W, 16, COLUMNS))


@triton.jit
def load_keys(side, first, c: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr):
    """16 rows of K at the channels of step `c`, as the matrix unit takes them: FP16 [W, 16, step].

    Codes of 8 bits are put in order as bytes and then widened, which moves half as many bytes.
    """
    STEP: tl.constexpr = LAYOUT.step
    channel = c * STEP + tl.arange(0, STEP)
    if LAYOUT.bits == 8:
        row = first + tl.arange(0, 8)
        top = load_bytes(side, row, channel, LAYOUT.head_dim)
        bottom = load_bytes(side, row + 8, channel, LAYOUT.head_dim)
        k = widened(in_operand_order(top, bottom, STEP, W), False, LAYOUT)
    else:
        top, bottom = load_halves(side, first, channel, LAYOUT)
        k = in_operand_order(top, bottom, STEP, W)
    return k


@triton.jit
def load_channels(side, first, channel, LAYOUT: tl.constexpr, W: tl.constexpr):
    """16 rows of V at 16 channels, as the matrix unit takes them: FP16 [W, 16 channels, 16 rows]."""
    if LAYOUT.bits == 8:
        rows = load_bytes(side, first + tl.arange(0, 16), channel, LAYOUT.head_dim)
        v = widened(tl.permute(rows, (0, 2, 1)), False, LAYOUT)
    else:
        halves = tl.join(*load_halves(side, first, channel, LAYOUT))
        v = tl.reshape(tl.permute(halves, (0, 2, 3, 1)), (W, 16, 16))
    return v


@triton.jit
def row_of(place, LAYOUT: tl.constexpr):
    """The row, of 16, at a place along the row axis of the tensors above. The first eight places of `load_halves` are
    its first tensor."""
    return place if LAYOUT.bits == 8 else place % 8 * 2 + place // 8


@triton.jit
def load_row_scales(side, first, block: tl.constexpr, LAYOUT: tl.constexpr):
    """Scales FP32 [W, 16] of one block of 16 rows, in the order of `row_of`."""
    row = first + row_of(tl.arange(0, 16), LAYOUT)
    place = LAYOUT.scale + row * LAYOUT.row_scales + block
    return row_scales(tl.load(side[:, None] + place[None, :]), LAYOUT)


@triton.jit
def float_scores(keys, first, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores FP32 [W, 16, N] of 16 rows, without the factor `unit` and the pages' factors."""
    STEP: tl.constexpr = LAYOUT.step
    score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
    for c in tl.static_range(LAYOUT.head_dim // STEP):
        k = load_keys(keys, first, c, LAYOUT, W)
        if LAYOUT.row_scales > 0:
            found = product(k, query[c], tl.zeros((W, ROWS_AT_ONCE, N), tl.float32))
            score += found * load_row_scales(keys, first, c * STEP // LAYOUT.block, LAYOUT)[:, :, None]
        else:
            score = product(k, query[c], score)
    return score


@triton.jit
def scaled_weights(p, values, first, block: tl.constexpr, LAYOUT: tl.constexpr):
    """Weights FP16 [W, 16, N] times the scales of a block of V, and the factor [W] that their products still need."""
    scales = load_row_scales(values, first, block, LAYOUT)
    largest = tl.maximum(tl.max(scales, 1), SMALLEST)
    relative = scales * (1.0 / largest * WEIGHT_UNIT)[:, None]
    return (p.to(tl.float32) * relative[:, :, None]).to(tl.float16), largest * (1.0 / WEIGHT_UNIT)


@triton.jit
def add_float_pages(state, keys, values, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages whose K and V begin at `keys` and `values` [W] added to the running softmax, as `rows.add_row_pages`."""
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    k_factor = tl.full((W,), LAYOUT.unit, tl.float32)
    v_factor = k_factor
    if not LAYOUT.power:
        k_factor, v_factor = k_factor * page_factor(keys, LAYOUT), v_factor * page_factor(values, LAYOUT)
    for first in tl.range(0, PI, ROWS_AT_ONCE, num_stages=1):
        top, weight, out = state
        score = float_scores(keys, first, query, LAYOUT, W, N) * k_factor[:, None, None]
        new_top, kept, p, weight = weights_of(top, weight, score, valid, W, N)
        scaled, factor = p, v_factor
        added = ()
        for m in tl.static_range(D // 16):
            if LAYOUT.row_scales > 0 and m * 16 % LAYOUT.block == 0:
                scaled, factor = scaled_weights(p, values, first, m * 16 // LAYOUT.block, LAYOUT)
                factor *= v_factor
            v = load_channels(values, first, m * 16 + tl.arange(0, 16), LAYOUT, W)
            found = product(v, scaled, tl.zeros((W, 16, N), tl.float32))
            added = added + (out[m] * kept[:, None, :] + found * factor[:, None, None],)
        state = (new_top, weight, added)
    return state


def float_decode_launch(
    fmt: FloatFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    registers = REGISTERS if fmt.head_dim <= NARROW else ALL_REGISTERS
    reader = PageReader(rounded_query, add_float_pages, float_layout(fmt), registers)
    return paged_launch(reader, pool.planes["k"], pool.planes["v"], pool, spans, q, out, workspace)
