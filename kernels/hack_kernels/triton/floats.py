"""Decode over FP8 pages: E4M3 with one scale per page, codec `fp8` on a GPU.

Codes become FP16 in registers, by moving their bits: an exponent of E4M3 in FP16's place is less by 8, so the number
is 2^-8 of what the code stands for, subnormal ones too. Scores and outputs take the page's scale times 2^8 in FP32.
K and V of a page are records: the codes, and then the scale, so that one pointer finds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import DEFINITION, PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention
from hack_kernels.float_format import FloatFormat
from hack_kernels.reference.floats import FloatReference
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import ALL_REGISTERS, LOWEST, REGISTERS, PageReader, paged_launch, rows_of_heads
from hack_kernels.triton.rows import ROWS_AT_ONCE, product, rounded_query
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.tiles import INTERPRETED, doubled, equal_halves

TAIL_BYTES: Final = 16
"""Behind the codes of a record: the scale, and what keeps the next record where 16 bytes are loaded at once."""

WIDEST: Final = 128
"""With more channels a program spills (`python -m lab.gpu.inspect`), so the definition serves."""
NARROW: Final = 64
"""Up to this head_dim three programs fit a multiprocessor without spills; wider pages take all registers."""


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """A record of K or V of one KV head: codes [Π, D] uint8, scale FP32."""

    head_dim: int
    page_tokens: int
    dtype: tl.dtype = tl.float16
    """What queries and weights are rounded to."""

    @property
    def code_bytes(self) -> int:
        """Where the scale stands."""
        return self.page_tokens * self.head_dim

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record to the next head's."""
        return self.code_bytes + TAIL_BYTES


WIDEN: Final = tl.constexpr(
    """{
    .reg .b32 low, high, moved;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.b32 moved, low, 1;
    and.b32 moved, moved, 0x3F803F80;
    lop3.b32 $0, low, 0x80008000, moved, 0xEA;
    shr.b32 moved, high, 1;
    and.b32 moved, moved, 0x3F803F80;
    lop3.b32 $1, high, 0x80008000, moved, 0xEA;
    }"""
)
"""Four codes to two pairs of FP16: each code to the upper byte, all but its sign one bit down."""


@triton.jit
def widened(codes):
    """E4M3 as FP16, times 2^-8."""
    if INTERPRETED:
        bits = codes.to(tl.int16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(WIDEN, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)


@triton.jit
def scale_of(record, LAYOUT: tl.constexpr):
    """Scales of W records [W], times 2^8."""
    return tl.load((record + LAYOUT.code_bytes).to(tl.pointer_type(tl.float32), bitcast=True)) * 256.0


@triton.jit
def load_float_keys(codes, first, c: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """As `rows.load_keys`, of codes."""
    row, channel = first + tl.arange(0, 8), c * 32 + tl.arange(0, 32)
    place = row[:, None] * D + channel[None, :]
    top = tl.load(codes[:, None, None] + place[None, :, :])
    bottom = tl.load(codes[:, None, None] + (8 * D + place)[None, :, :])
    split = tl.reshape(tl.join(top, bottom), (W, 8, 4, 2, 2, 2, 2))  # row, quad, step, half, one, half of the rows
    return widened(tl.reshape(tl.permute(split, (0, 6, 1, 3, 4, 2, 5)), (W, 16, 32)))


@triton.jit
def add_float_pages(state, keys, values, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages whose records begin at `keys` and `values` [W] added to the running softmax, as `rows.add_row_pages`."""
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    k_scale, v_scale = scale_of(keys, LAYOUT), scale_of(values, LAYOUT)
    for first in tl.range(0, PI, ROWS_AT_ONCE, num_stages=1):
        top, weight, out = state
        score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
        for c in tl.static_range(D // 32):
            score = product(load_float_keys(keys, first, c, D, W), query[c], score)
        score = score * k_scale[:, None, None]
        new_top = tl.maximum(top, tl.where(valid[:, None], tl.max(score, 1), LOWEST))
        kept = tl.exp2(top - new_top)
        base = tl.where(valid[:, None], new_top, -LOWEST)  # pages that do not count get weights of 0
        p = tl.exp2(score - base[:, None, :]).to(tl.float16)
        ones = tl.full((W, 16, ROWS_AT_ONCE), 1.0, tl.float32).to(tl.float16)
        weight = equal_halves(product(ones, p, doubled(weight * kept[:, None, :], W, N)), W, N)
        row = first + tl.arange(0, ROWS_AT_ONCE)
        added = ()
        for m in tl.static_range(D // 16):
            place = row[:, None] * D + (m * 16 + tl.arange(0, 16))[None, :]
            v = widened(tl.permute(tl.load(values[:, None, None] + place[None, :, :]), (0, 2, 1)))
            found = product(v, p, tl.zeros((W, 16, N), tl.float32))
            added = added + (out[m] * kept[:, None, :] + found * v_scale[:, None, None],)
        state = (new_top, weight, added)
    return state


class FloatTriton(FloatReference):
    """Implements `PageKernels` for FP8 pages with a scale each. Decode of 16-bit queries is the kernel of this file.

    The rest is the definition's, in torch on the device: seals, prompts, and FP32 queries, which the kernel would round
    to FP16.
    """

    served_by = f"triton, {DEFINITION}"

    def __init__(self, fmt: FloatFormat, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device)
        self._workspace = workspace

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Views into the records."""
        return tuple(new_float_pages(cast(FloatFormat, fmt), num_pages, num_kv_heads, self.device) for fmt in formats)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """In one launch and without waiting for the device, if the kernel takes it."""
        if rows.k is not None or rows.q.dtype.itemsize != 2:
            return super().attend(layer, pool, spans, rows)
        check_attention(self.fmt, pool, spans, rows)
        q = rows_of_heads(rows.q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        float_decode_launch(self.fmt, pool, spans, q, out, self._workspace).run()
        return out


def new_float_pages(fmt: FloatFormat, num_pages: int, num_kv_heads: int, device: torch.device) -> Planes:
    """Zeroed records, as the planes of the format: views of codes and of scales."""
    layout, planes = FloatLayout(fmt.head_dim, fmt.page_tokens), Planes()
    for side in ("k", "v"):
        shape = (num_pages, num_kv_heads, layout.head_stride)
        records = torch.zeros(shape, dtype=torch.uint8, device=device)
        planes[side] = records[..., : layout.code_bytes].unflatten(-1, (fmt.page_tokens, fmt.head_dim))
        planes[f"{side}_scale"] = records[..., layout.code_bytes : layout.code_bytes + 4].view(torch.float32)
    return planes


def float_decode_launch(
    fmt: FloatFormat, pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    registers = REGISTERS if fmt.head_dim <= NARROW else ALL_REGISTERS
    reader = PageReader(rounded_query, add_float_pages, FloatLayout(fmt.head_dim, fmt.page_tokens), registers)
    return paged_launch(reader, pool.planes["k"], pool.planes["v"], pool, spans, q, out, workspace)
