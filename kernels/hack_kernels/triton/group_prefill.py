"""Prompts over pages of integer codes in groups: s·c + m in FP32 registers, multiplied as TF32."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.group_format import GroupFormat
from hack_kernels.triton.group_layout import group_layout, halves_at
from hack_kernels.triton.prefill import PromptReader
from hack_kernels.triton.prefill_read import add_read_page, read_query_rows, read_tiling


@triton.jit
def group_values(record, OF_V: tl.constexpr, row, first, CHANNELS: tl.constexpr, LAYOUT: tl.constexpr):
    """What the codes of rows of K or V stand for, in channels from `first` on: FP32 [rows, CHANNELS]; 0 past D."""
    D: tl.constexpr = LAYOUT.head_dim
    SIDE: tl.constexpr = LAYOUT.v if OF_V else LAYOUT.k
    TOGETHER: tl.constexpr = 8 // SIDE.bits
    channel = first + tl.arange(0, CHANNELS)
    inside = (row >= 0)[:, None] & (channel < D)[None, :]
    at = record + SIDE.begin + (row // TOGETHER)[:, None] * D + channel[None, :]
    codes = tl.load(at, mask=inside, other=0).to(tl.int32)
    codes = (codes >> (row % TOGETHER * SIDE.bits)[:, None]) & SIDE.levels
    if OF_V:
        place = row[:, None] * (D // SIDE.group) + (channel // SIDE.group)[None, :]
    else:
        place = (row // SIDE.group)[:, None] * D + channel[None, :]
    scale = tl.load(halves_at(record, SIDE.scale) + place, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(halves_at(record, SIDE.minimum) + place, mask=inside, other=0.0).to(tl.float32)
    return codes.to(tl.float32) * scale + minimum


@triton.jit
def add_group_page(state, query, record, first_block, TILING: tl.constexpr, LAYOUT: tl.constexpr):
    """A page added to the running softmax."""
    return add_read_page(state, query, record, first_block, group_values, TILING, LAYOUT)


def group_prompt_reader(fmt: GroupFormat) -> PromptReader:
    """For queries of 16 bits."""
    return PromptReader(read_query_rows, add_group_page, group_layout(fmt), read_tiling(fmt.head_dim))
