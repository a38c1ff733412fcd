"""Decode over pages of deltas against anchor rows: codec `cachegen-delta`. A row is its group's anchor plus its delta,
in FP32, rounded to FP16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from hack_kernels.delta_format import ANCHOR_CENTRE, DeltaFormat
from hack_kernels.triton.float_decode import in_operand_order
from hack_kernels.triton.float_query import ROWS_AT_ONCE, product
from hack_kernels.triton.read_decode import add_read_pages
from hack_kernels.triton.read_layout import (
    STEP,
    CodePlanes,
    ReadLayout,
    bytes_at,
    code_planes,
    halves,
    one_after_another,
    packed_codes,
    rounded_half,
)

MIDDLE = tl.constexpr(ANCHOR_CENTRE)


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """K or V of a record."""

    anchor: int
    """Offset in the record of the codes of anchors."""
    scale: int
    """Offset in the record of the scales of rows."""
    deltas: CodePlanes
    centre: int
    """C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayout(ReadLayout):
    """A record of deltas."""

    group: int
    """Rows that share an anchor."""
    k: DeltaPart
    v: DeltaPart


@lru_cache(maxsize=64)
def delta_layout(fmt: DeltaFormat) -> DeltaLayout:
    """The layout of a format's pages."""
    places, nbytes = one_after_another(fmt.planes)
    at = dict(places)

    def part(name: str) -> DeltaPart:
        side = fmt.side(name)
        return DeltaPart(at[f"{name}_anchor"], at[f"{name}_scale"], code_planes(name, side.bits, at), side.centre)

    return DeltaLayout(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        places=places,
        nbytes=nbytes,
        step=STEP,
        group=fmt.group,
        k=part("k"),
        v=part("v"),
    )


@triton.jit
def delta_rows(record, row, channel, PART: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows of pages at `record` [W] at some channels: FP16 [W, rows, channels]."""
    D: tl.constexpr = LAYOUT.head_dim
    group = row // LAYOUT.group
    anchor_row = group * LAYOUT.group
    size = halves(record, PART.scale, anchor_row) * (1.0 / MIDDLE)
    x = (bytes_at(record + PART.anchor, group, channel, D) - MIDDLE).to(tl.float32) * size[:, :, None]
    # Rows that are anchors have no code of a delta; the code before it is loaded and not used.
    codes = packed_codes(record, tl.maximum(row - group - 1, 0), channel, PART.deltas, D)
    reach = halves(record, PART.scale, row) * (2.0 / PART.centre)
    delta = (codes - PART.centre).to(tl.float32) * reach[:, :, None]
    return rounded_half(x + tl.where((row == anchor_row)[None, :, None], 0.0, delta))


@triton.jit
def delta_scores(record, first, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """See `add_read_pages`."""
    STEP: tl.constexpr = LAYOUT.step
    row = first + tl.arange(0, 8)
    score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
    for c in tl.static_range(LAYOUT.head_dim // STEP):
        channel = c * STEP + tl.arange(0, STEP)
        upper = delta_rows(record, row, channel, LAYOUT.k, LAYOUT)
        lower = delta_rows(record, row + 8, channel, LAYOUT.k, LAYOUT)
        score = product(in_operand_order(upper, lower, STEP, W), query[c], score)
    return score


@triton.jit
def delta_values(record, row, channel, query, LAYOUT: tl.constexpr):
    """See `add_read_pages`."""
    return delta_rows(record, row, channel, LAYOUT.v, LAYOUT)


@triton.jit
def add_delta_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """See `paged.decode_kernel`."""
    return add_read_pages(state, record, valid, query, delta_scores, delta_values, LAYOUT, W, N)
