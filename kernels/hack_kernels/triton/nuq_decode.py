"""Decode over pages of non-uniform levels with outliers aside: codecs `kvquant-*`.

A value is looked up among the layer's poles and moved into the range of its vector, in FP32; outliers take their
places; the result is rounded to FP16. K of a calibrated format is rotated by the numbers of its rows.
The angle of a page's first row is computed in FP64, as in the definition, and those of the others from there on in
FP32.

The tables are FP32 numbers, one after another: poles of K, poles of V, and with calibration the frequencies, and the
range [2, D] of K of each KV head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.nuq_format import OUTLIERS, NuqFormat, NuqTables
from hack_kernels.triton.float_decode import in_operand_order
from hack_kernels.triton.float_query import ROWS_AT_ONCE, product
from hack_kernels.triton.read_decode import add_read_pages
from hack_kernels.triton.read_layout import (
    STEP,
    CodePlanes,
    ReadLayout,
    code_planes,
    halves,
    one_after_another,
    packed_codes,
    rounded_half,
)
from hack_kernels.triton.tiles import INTERPRETED

RANKS = tl.constexpr(OUTLIERS)
WHOLE_TURN = tl.constexpr(2 * math.pi)


@dataclass(frozen=True, slots=True)
class NuqPart:
    """K or V of a record. Offsets of planes that pages lack are 0."""

    codes: CodePlanes
    span: int
    """Offset in the record of the ranges."""
    at: int
    """Offset in the record of the places of outliers."""
    out: int
    """Offset in the record of outliers."""
    first: int
    """Offset in the record of the number of the page's first row."""
    poles: int
    """Where the poles begin in the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NuqLayout(ReadLayout):
    """A record of codes on non-uniform levels."""

    calibrated: bool
    k: NuqPart
    v: NuqPart

    @property
    def frequencies(self) -> int:
        """Where the frequencies begin in the tables."""
        return self.v.poles + (1 << self.v.codes.bits)

    @property
    def ranges(self) -> int:
        """Where the ranges of K begin in the tables."""
        return self.frequencies + self.head_dim // 2


@lru_cache(maxsize=64)
def nuq_layout(fmt: NuqFormat) -> NuqLayout:
    """The layout of a format's pages."""
    places, nbytes = one_after_another(fmt.planes)
    at = dict(places)

    def part(name: str, poles: int) -> NuqPart:
        span, first = (at.get(f"{name}_{plane}", 0) for plane in ("range", "first"))
        codes = code_planes(name, fmt.side(name).bits, at)
        return NuqPart(codes, span, at[f"{name}_at"], at[f"{name}_out"], first, poles)

    return NuqLayout(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        places=places,
        nbytes=nbytes,
        step=STEP,
        calibrated=fmt.calibrated,
        k=part("k", 0),
        v=part("v", 1 << fmt.k_bits),
    )


def kernel_tables(fmt: NuqFormat, poles: tuple[Tensor, Tensor], tables: NuqTables | None, heads: slice) -> Tensor:
    """The tables that kernels read for these KV heads of the model. `tables` are those of a calibrated format."""
    parts = list(poles)
    if tables is not None:
        parts += [tables.frequencies, tables.k_range[:, heads].transpose(0, 1)]
    return torch.cat([part.flatten() for part in parts])


@triton.jit
def spread(low, high):
    """z and r of ranges."""
    return (high + low) * 0.5, (high - low) * 0.5


@triton.jit
def pole_of(record, row, channel, PART: tl.constexpr, tables, D: tl.constexpr):
    """The poles FP32 [W, rows, channels] that codes name."""
    return tl.load(tables + PART.poles + packed_codes(record, row, channel, PART.codes, D))


@triton.jit
def outlier_places(record, place, PART: tl.constexpr, LAST: tl.constexpr):
    """Where outliers stand in their vectors, INT32 [W, places], at most LAST."""
    return tl.minimum(tl.load((record + PART.at)[:, None] + place[None, :]).to(tl.int32), LAST)


@triton.jit
def nuq_keys(record, row, channel, tables, head, LAYOUT: tl.constexpr):
    """Rows of K at some channels, as they rest: FP32 [W, rows, channels]."""
    K: tl.constexpr = LAYOUT.k
    D: tl.constexpr = LAYOUT.head_dim
    if LAYOUT.calibrated:
        known = tables + LAYOUT.ranges + head * (2 * D) + channel
        middle, reach = spread(tl.load(known)[None, :], tl.load(known + D)[None, :])
    else:
        middle, reach = spread(halves(record, K.span, channel), halves(record, K.span, D + channel))
    x = pole_of(record, row, channel, K, tables, D) * reach[:, None, :] + middle[:, None, :]
    for rank in tl.static_range(RANKS):
        at = outlier_places(record, rank * D + channel, K, LAYOUT.page_tokens - 1)
        aside = halves(record, K.out, rank * D + channel)
        x = tl.where(row[None, :, None] == at[:, None, :], aside[:, None, :], x)
    return x


@triton.jit
def cos_sin(turns):
    """Cosines and sines of FP32 angles in whole turns, to 2^-20."""
    angle = (turns - tl.floor(turns + 0.5)) * WHOLE_TURN
    if INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    # CUDA's accurate functions keep digits of π in local memory, which is as slow as a spill.
    return tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;",
        "=f,=f,f",
        [angle],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def page_turns(record, frequency, LAYOUT: tl.constexpr):
    """The turns FP32 [W, pairs], less whole ones, by which pages' first rows are rotated."""
    page_row = tl.load((record + LAYOUT.k.first).to(tl.pointer_type(tl.float32), bitcast=True))
    turns = page_row.to(tl.float64)[:, None] * frequency.to(tl.float64)[None, :] * (1.0 / WHOLE_TURN)
    return (turns - tl.floor(turns)).to(tl.float32)


@triton.jit
def key_pairs(record, row, pair, turns, frequency, tables, head, LAYOUT: tl.constexpr):
    """The two channels of some pairs of rows of K, FP16 [W, rows, pairs] each; with calibration rotated, for which
    `turns` are `page_turns`."""
    low = nuq_keys(record, row, pair, tables, head, LAYOUT)
    high = nuq_keys(record, row, LAYOUT.head_dim // 2 + pair, tables, head, LAYOUT)
    if LAYOUT.calibrated:
        further = row.to(tl.float32)[:, None] * (frequency * (1.0 / WHOLE_TURN))[None, :]
        cos, sin = cos_sin(turns[:, None, :] + further[None, :, :])
        low, high = low * cos - high * sin, high * cos + low * sin
    return rounded_half(low), rounded_half(high)


@triton.jit
def nuq_scores(record, first, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """See `add_read_pages`."""
    PLACES: tl.constexpr = LAYOUT.step
    STEPS: tl.constexpr = LAYOUT.head_dim // PLACES
    tables, head = query[STEPS], query[STEPS + 1]
    row = first + tl.arange(0, 8)
    score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
    for c in tl.static_range(STEPS // 2):
        pair = c * PLACES + tl.arange(0, PLACES)
        turns, frequency = 0.0, 0.0
        if LAYOUT.calibrated:
            frequency = tl.load(tables + LAYOUT.frequencies + pair)
            turns = page_turns(record, frequency, LAYOUT)
        upper = key_pairs(record, row, pair, turns, frequency, tables, head, LAYOUT)
        lower = key_pairs(record, row + 8, pair, turns, frequency, tables, head, LAYOUT)
        score = product(in_operand_order(upper[0], lower[0], PLACES, W), query[c], score)
        score = product(in_operand_order(upper[1], lower[1], PLACES, W), query[STEPS // 2 + c], score)
    return score


@triton.jit
def nuq_values(record, row, channel, query, LAYOUT: tl.constexpr):
    """See `add_read_pages`."""
    V: tl.constexpr = LAYOUT.v
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    middle, reach = spread(halves(record, V.span, row), halves(record, V.span, PI + row))
    tables = query[D // LAYOUT.step]
    x = pole_of(record, row, channel, V, tables, D) * reach[:, :, None] + middle[:, :, None]
    for rank in tl.static_range(RANKS):
        at = outlier_places(record, rank * PI + row, V, D - 1)
        aside = halves(record, V.out, rank * PI + row)
        x = tl.where(channel[None, None, :] == at[:, :, None], aside[:, :, None], x)
    return rounded_half(x)


@triton.jit
def add_nuq_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """See `paged.decode_kernel`."""
    return add_read_pages(state, record, valid, query, nuq_scores, nuq_values, LAYOUT, W, N)
