"""Decode over uncompressed pages: codec `fp16` on a GPU, and what compression is measured against.

Pages are FP16 or BF16 rows [N, Hkv, Π, D]. A warp reads 16 rows at a time, which is as much as registers hold while
three programs run on a multiprocessor; K goes from memory to the matrix unit as it is, V once through shared memory to
be transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.check import check_attention
from hack_kernels.hack_format import HEAD_DIMS, PAGE_TOKENS
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.triton.dense import attn_dense
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import LOWEST, PageReader, paged_launch, rows_of_heads
from hack_kernels.triton.query import LOG2_E
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.tiles import INTERPRETED, doubled, equal_halves

ROWS_AT_ONCE = tl.constexpr(16)
"""Rows that a warp reads in one iteration."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A page of rows [Π, D] of one KV head."""

    head_dim: int
    page_tokens: int
    dtype: tl.dtype

    @property
    def step(self) -> int:
        """Channels of K that are multiplied at once."""
        return 32

    @property
    def head_stride(self) -> int:
        """Elements from one KV head's page to the next head's."""
        return self.page_tokens * self.head_dim


@triton.jit
def rounded_query(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """Query heads in the type of the pages, scaled for scores in log2: a tuple over steps of [W, step, N]."""
    D: tl.constexpr = LAYOUT.head_dim
    STEP: tl.constexpr = LAYOUT.step
    head = tl.arange(0, N)[None, :]
    query = ()
    for c in tl.static_range(D // STEP):
        # The order in which a lane's part of a K row is operands: bits (product, half, quad, quad, one) of the place.
        place = tl.arange(0, STEP)
        channel = c * STEP + place // 2 % 4 * (STEP // 4) + place // 16 * 4 + place // 8 % 2 * 2 + place % 2
        x = tl.load(q + head * D + channel[:, None], mask=head < heads, other=0.0).to(tl.float32)
        x = (x * (LOG2_E * D**-0.5)).to(LAYOUT.dtype)
        query = query + (tl.broadcast_to(x[None, :, :], (W, STEP, N)),)
    return query


@triton.jit
def product(a, b, added):
    """a·b + added in FP32. Triton 3.9's interpreter would multiply the bit patterns of BF16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), added)
    return tl.dot(a, b, added)


@triton.jit
def load_keys(rows, first, c: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Channels 32·c.. of 16 rows from `first` on: [W, 16, 32] in the order of `rounded_query`.

    Eight rows are one 16-byte load of a warp. More at once, and Triton would spread a page over several warps, so that
    K had to go through shared memory.
    """
    row, channel = first + tl.arange(0, 8), c * 32 + tl.arange(0, 32)
    place = row[:, None] * D + channel[None, :]
    top = tl.load(rows[:, None, None] + place[None, :, :])
    bottom = tl.load(rows[:, None, None] + (8 * D + place)[None, :, :])
    split = tl.reshape(tl.join(top, bottom), (W, 8, 4, 2, 2, 2, 2))  # row, quad, step, half, one, half of the rows
    return tl.reshape(tl.permute(split, (0, 6, 1, 3, 4, 2, 5)), (W, ROWS_AT_ONCE, 32))


@triton.jit
def add_row_pages(state, keys, values, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages whose rows begin at `keys` and `values` [W] added to the running softmax."""
    D: tl.constexpr = LAYOUT.head_dim
    PI: tl.constexpr = LAYOUT.page_tokens
    for first in tl.range(0, PI, ROWS_AT_ONCE, num_stages=1):
        top, weight, out = state
        score = tl.zeros((W, ROWS_AT_ONCE, N), tl.float32)
        for c in tl.static_range(D // 32):
            score = product(load_keys(keys, first, c, D, W), query[c], score)
        new_top = tl.maximum(top, tl.where(valid[:, None], tl.max(score, 1), LOWEST))
        kept = tl.exp2(top - new_top)
        base = tl.where(valid[:, None], new_top, -LOWEST)  # pages that do not count get weights of 0
        p = tl.exp2(score - base[:, None, :]).to(LAYOUT.dtype)
        ones = tl.full((W, 16, ROWS_AT_ONCE), 1.0, tl.float32).to(LAYOUT.dtype)
        weight = equal_halves(product(ones, p, doubled(weight * kept[:, None, :], W, N)), W, N)
        # Always `values`, but known only with the scores: V beside K would take more registers than there are.
        v_rows = values + (tl.max(new_top, 1) <= 2 * LOWEST).to(tl.int32) * D
        row = first + tl.arange(0, ROWS_AT_ONCE)
        added = ()
        for m in tl.static_range(D // 16):
            place = row[:, None] * D + (m * 16 + tl.arange(0, 16))[None, :]
            v = tl.permute(tl.load(v_rows[:, None, None] + place[None, :, :]), (0, 2, 1))
            added = added + (product(v, p, out[m] * kept[:, None, :]),)
        state = (new_top, weight, added)
    return state


class RowTriton(RowReference):
    """Implements `PageKernels` for `RowFormat`. Decode of 16-bit queries is the kernel of this file.

    Prompts read pages where they lie (`dense.py`). FP32 queries, which kernels would round to FP16, keep their
    precision: they are the definition's.
    """

    served_by = "triton"

    def __init__(self, fmt: RowFormat, device: torch.device, workspace: Workspace, *, dense: bool) -> None:
        super().__init__(fmt, device)
        self._workspace, self._dense = workspace, dense

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """In one launch and without waiting for the device, if the kernel takes it."""
        if rows.q.dtype.itemsize != 2 or (rows.k is not None and not self._dense):
            return super().attend(layer, pool, spans, rows)
        check_attention(self.fmt, pool, spans, rows)
        if rows.k is not None:
            return attn_dense(pool, spans, rows, (pool.planes["k"], pool.planes["v"]), in_place=True)
        return attn_decode_rows(pool, spans, rows.q, self._workspace)


def attn_decode_rows(pool: Pool, spans: Spans, q: Tensor, workspace: Workspace) -> Tensor:
    """Decode over pages `k`, `v` [N, Hkv, Π, D]; the rest as in `decode.attn_decode`. Raises `ValueError`."""
    k, v = pool.planes["k"], pool.planes["v"]
    if k.shape != v.shape or k.dtype is not v.dtype or k.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}; expected FP16 or BF16 alike"
        )
    if k.shape[2] not in PAGE_TOKENS or k.shape[3] not in HEAD_DIMS or k.stride() != v.stride():
        raise ValueError(f"pages are {tuple(k.shape)} with strides {k.stride()} and {v.stride()}")
    q = rows_of_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows_launch(pool, spans, q, out, workspace).run()
    return out


def rows_launch(pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    k, v = pool.planes["k"], pool.planes["v"]
    page_tokens, head_dim = k.shape[2:]
    layout = RowLayout(head_dim, page_tokens, tl.float16 if k.dtype is torch.float16 else tl.bfloat16)
    reader = PageReader(rounded_query, add_row_pages, layout)
    return paged_launch(reader, k, v, pool, spans, q, out, workspace)
