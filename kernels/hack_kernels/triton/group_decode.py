"""Decode over pages of integer codes in groups: codecs `kivi-*` and `cachegen*`.

Keys whose groups have minima are dequantized in registers, s·c + m in FP16, as published. Centred keys are multiplied
as c - C, and the scale of a row multiplies its score. A group of V lies in one row, so its scale and minimum multiply
the row's weight. Codes of V are multiplied as they are, and a product with ones adds the share of the minima.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.group_format import GroupFormat
from hack_kernels.triton.float_decode import SMALLEST, WEIGHT_UNIT, in_operand_order, load_bytes
from hack_kernels.triton.float_query import ROWS_AT_ONCE, product, rounded_query, weights_of
from hack_kernels.triton.group_layout import group_layout, halves_at, widened_codes
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import ALL_REGISTERS, PageReader, paged_launch
from hack_kernels.triton.split import Workspace


@triton.jit
def load_pairs(record, first, channel, SIDE: tl.constexpr, D: tl.constexpr):
    """Codes of 16 rows from `first` on at some channels, FP16 [W, 8, channels]: those of even rows and of odd ones."""
    row = tl.arange(0, 8)
    if SIDE.bits == 2:
        codes = load_bytes(record + SIDE.begin, first // 4 + row // 2, channel, D)
        codes = codes >> (row % 2 * 4).to(tl.uint8)[None, :, None]
    else:
        codes = load_bytes(record + SIDE.begin, first // 2 + row, channel, D)
    if SIDE.bits == 5:
        high = load_bytes(record + SIDE.high, first // 8 + row // 4, channel, D)
        high = high >> (row % 4 * 2).to(tl.uint8)[None, :, None]
        even, odd = (codes & 0x0F) | ((high & 1) << 4), (codes >> 4) | ((high & 2) << 3)
        pairs = widened_codes(even, False, SIDE), widened_codes(odd, False, SIDE)
    else:
        pairs = widened_codes(codes, False, SIDE), widened_codes(codes, True, SIDE)
    return pairs


@triton.jit
def load_numbers(record, offset, first, block: tl.constexpr, SIDE: tl.constexpr, D: tl.constexpr):
    """FP32 [W, 16]: the scales or minima of one group of each of 16 rows, in the order of `in_operand_order`."""
    place = tl.arange(0, 16)
    row = (first + place % 8 * 2 + place // 8) * (D // SIDE.group) + block
    return tl.load(halves_at(record, offset)[:, None] + row[None, :]).to(tl.float32)


@triton.jit
def load_group_keys(record, first, c: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr):
    """16 rows of K at the channels of step `c`, FP16 [W, 16, step] in the order of `rounded_query`. Scales of centred
    rows are left out."""
    SIDE: tl.constexpr = LAYOUT.k
    D: tl.constexpr = LAYOUT.head_dim
    channel = c * LAYOUT.step + tl.arange(0, LAYOUT.step)
    even, odd = load_pairs(record, first, channel, SIDE, D)
    if not SIDE.centre:
        # Eight rows share these numbers; each number is loaded in the lanes that hold the rows' codes.
        place = (first // SIDE.group * D + tl.arange(0, 8) * 0)[:, None] + channel[None, :]
        scale = tl.load(halves_at(record, SIDE.scale)[:, None, None] + place[None, :, :])
        minimum = tl.load(halves_at(record, SIDE.minimum)[:, None, None] + place[None, :, :])
        even, odd = even * scale + minimum, odd * scale + minimum
    return in_operand_order(even, odd, LAYOUT.step, W)


@triton.jit
def weighted(p, factors):
    """Weights FP16 [W, 16, N] times FP32 factors [W, 16] of their rows, and the factor FP32 [W] that products need."""
    largest = tl.maximum(tl.max(tl.abs(factors), 1), SMALLEST)
    relative = factors * (1.0 / largest * WEIGHT_UNIT)[:, None]
    return (p.to(tl.float32) * relative[:, :, None]).to(tl.float16), largest * (1.0 / WEIGHT_UNIT)


@triton.jit
def add_group_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages at `record` [W] added to the running softmax, as `rows.add_row_pages`."""
    D: tl.constexpr = LAYOUT.head_dim
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    for first in tl.range(0, LAYOUT.page_tokens, ROWS_AT_ONCE, num_stages=1):
        top, weight, out = state
        score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
        for c in tl.static_range(D // LAYOUT.step):
            score = product(load_group_keys(record, first, c, LAYOUT, W), query[c], score)
        if K.centre:
            score *= (load_numbers(record, K.scale, first, 0, K, D) * (1.0 / K.centre))[:, :, None]
        new_top, kept, p, weight = weights_of(top, weight, score, valid, W, N)
        ones = tl.full((W, 16, ROWS_AT_ONCE), 1.0, tl.float32).to(tl.float16)
        added = ()
        for m in tl.static_range(D // 16):
            if m * 16 % V.group == 0:
                scaled, step = weighted(p, load_numbers(record, V.scale, first, m * 16 // V.group, V, D))
                if V.centre:
                    step *= 1.0 / V.centre
                else:
                    lowest, origin = weighted(p, load_numbers(record, V.minimum, first, m * 16 // V.group, V, D))
                    least = product(ones, lowest, tl.zeros((W, 16, N), tl.float32)) * origin[:, None, None]
            halves = tl.join(*load_pairs(record, first, m * 16 + tl.arange(0, 16), V, D))
            v = tl.reshape(tl.permute(halves, (0, 2, 3, 1)), (W, 16, ROWS_AT_ONCE))
            found = product(v, scaled, tl.zeros((W, 16, N), tl.float32)) * step[:, None, None]
            if not V.centre:
                found += least
            added = added + (out[m] * kept[:, None, :] + found,)
        state = (new_top, weight, added)
    return state


def group_decode_launch(
    fmt: GroupFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    # Within `REGISTERS`, sm_100 spills at a head_dim of 64 too.
    reader = PageReader(rounded_query, add_group_pages, group_layout(fmt), ALL_REGISTERS)
    records = pool.planes["k_codes"]
    return paged_launch(reader, records, records, pool, spans, q, out, workspace)
