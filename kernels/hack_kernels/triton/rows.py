"""Decode over uncompressed pages: codec `fp16` on a GPU, against which compression is measured.

Pages are FP16 or BF16 rows [N, Hkv, Π, D]. Rows need no decoding, so a program takes one tile of rows after another,
whatever pages they lie in. Meanwhile the next tiles are on their way to shared memory (Triton's software pipelining).
Query heads are the 16 rows of a matrix product. Work is divided and merged as in `split.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
from hack_kernels.triton.float_query import product
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.own_page import place_of
from hack_kernels.triton.paged import LOWEST, programs_per_processor, rows_of_heads, step_arguments
from hack_kernels.triton.query import LOG2_E
from hack_kernels.triton.split import (
    Workspace,
    merge_if_last,
    opening_of,
    page_ends,
    partial_of,
    sequence_of,
)

QUERIES = tl.constexpr(16)
"""The fewest rows that the left operand of a matrix product may have: the query heads of one program."""
OWN_PAGE = tl.constexpr(2)
"""Cost of a sequence's own page, in sealed pages: it has as many bytes, and none is on its way when it begins."""


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How a program goes through rows."""

    elements: int = 2**13
    """Elements of a tile of K, and of V: rows × channels, a power of two."""
    stages: int = 3
    """Tiles of K and V in shared memory, plus one."""
    warps: int = 8
    registers: int = 128
    """Registers of a thread, at most, so that two programs fit a multiprocessor."""

    def rows(self, head_dim: int) -> int:
        """Rows of a tile."""
        return self.elements // (1 << (head_dim - 1).bit_length())

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program takes."""
        return (self.stages - 1) * 4 * self.elements + SCRATCH


SCRATCH: Final = 11 << 10
"""Bytes of shared memory for the exchange between a program's warps, in the largest of these kernels."""
ROW_TILING: Final = RowTiling()
"""A program multiplies 32 KiB of K and V at a time, and has 32 to 64 KiB on their way."""


@triton.jit
def page_of_rows(entry, i, last, PI: tl.constexpr, R: tl.constexpr):
    """Pages of the R rows from row i·min(R, Π) of a sequence on: one number, or [R, 1] where a tile has several pages.

    Page numbers are at `entry`. None is read at or past `last`, nor before the first.
    """
    if R <= PI:
        index = tl.minimum(i // (PI // R), last - 1)
        page = tl.load(entry + index, mask=index >= 0, other=0)
    else:
        index = tl.minimum(i + tl.arange(0, R)[:, None] // PI, last - 1)
        page = tl.load(entry + index, mask=index >= 0, other=0)
    return page


@triton.jit
def add_tile(state, query, k, v, seen, D: tl.constexpr, SOME: tl.constexpr):
    """Rows k, v [R, D'] added to the running softmax: all rows or, with SOME, the rows that are `seen` [R].

    The softmax is (largest score in log2 [16], weights [16, R], outputs [16, D']), all FP32. Weights are summed over
    rows at the end.
    """
    top, weights, out = state
    score = product(query, tl.trans(k), tl.zeros_like(weights)) * (LOG2_E * D**-0.5)
    if SOME:
        score = tl.where(seen[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    kept = tl.exp2(top - new_top)[:, None]
    p = tl.exp2(score - new_top[:, None])
    return new_top, weights * kept + p, product(p.to(v.dtype), v, out * kept)


@triton.jit(do_not_specialize_on_alignment=["batch"])
def rows_kernel(
    keys,
    values,
    page_stride,
    table,
    table_stride,
    starts,
    slots,
    batch,
    open_k,
    open_v,
    slot_stride,
    q,
    out,
    partials,
    tickets,
    D: tl.constexpr,
    PI: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_GAP: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    BY_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (HEADS · ceil(GROUP / N), parts): N query heads of a KV head, an equal share of all pages, R rows at a time.

    keys, values: FP16 or BF16 pools [pages, HEADS, PI, D] with strides `page_stride` and PI·D; the rest as in
    `paged.decode_kernel`. Only the own page of a slot is read. The other pages of the window are also in the pool,
    unchanged.
    """
    BLOCKS: tl.constexpr = (GROUP + N - 1) // N
    DP: tl.constexpr = triton.next_power_of_2(D)
    PIECES: tl.constexpr = max(1, PI // R)  # of a page
    TOGETHER: tl.constexpr = max(1, R // PI)  # pages of a tile
    SIZE: tl.constexpr = (D + 32) * N
    group, groups = tl.program_id(0), tl.num_programs(0)
    part = tl.program_id(1)
    head = group // BLOCKS
    first_query = head * GROUP + group % BLOCKS * N
    heads_here = GROUP if BLOCKS == 1 else tl.minimum(GROUP - group % BLOCKS * N, N)
    keys += head.to(tl.int64) * (PI * D)
    values += head.to(tl.int64) * (PI * D)
    row, channel, column = tl.arange(0, R), tl.arange(0, DP), tl.arange(0, QUERIES)
    inside = (channel < D)[None, :]
    within = (row if R <= PI else row % PI)[:, None] * D + channel[None, :]

    ends = page_ends(starts, batch, PI, BATCH, 1, OWN_PAGE)
    total = tl.max(ends, 0)
    parts = tl.minimum(tl.num_programs(1), total)  # no stretch is empty; the programs left over have nothing to do
    mine, stop = opening_of(part, parts, total), opening_of(part + 1, parts, total)
    past = tl.where(part < parts, sequence_of(stop - 1, ends) + 1, 0)
    # Offsets of lanes hoisted out of this loop would fill the registers that tiles need.
    for b in tl.range(sequence_of(mine, ends), past, disable_licm=True):
        start = tl.load(starts + b).to(tl.int32)
        pages = start // PI
        end = tl.max(tl.where(tl.arange(0, BATCH) == b, ends, 0), 0)
        begin = end - pages - OWN_PAGE
        at, until = tl.maximum(mine, begin), tl.minimum(stop, end)
        rows = b * (HEADS * GROUP) + first_query
        asked = q + (rows * D + b * Q_GAP) + column[:, None] * D + channel[None, :]
        query = tl.load(asked, mask=(column < heads_here)[:, None] & inside, other=0.0).to(keys.dtype.element_ty)
        state = (
            tl.full((QUERIES,), LOWEST, tl.float32),
            tl.zeros((QUERIES, R), tl.float32),
            tl.zeros((QUERIES, DP), tl.float32),
        )

        last = tl.minimum(until - begin, pages)
        entry = table + b * table_stride
        if BY_HEAD:
            entry += head * (table_stride // HEADS)
        first = (at - begin) * PIECES
        page = page_of_rows(entry, first, last, PI, R)
        for i in tl.range(first, last * PIECES, TOGETHER, num_stages=STAGES):
            place = page * page_stride + i % PIECES * (R * D)
            k_rows, v_rows = keys + place + within, values + place + within
            seen = i + row // PI < last
            if TOGETHER == 1 and D == DP:
                k, v = tl.load(k_rows), tl.load(v_rows)
            else:
                read = (seen | (TOGETHER == 1))[:, None] & inside
                k, v = tl.load(k_rows, mask=read, other=0.0), tl.load(v_rows, mask=read, other=0.0)
            page = page_of_rows(entry, i + TOGETHER, last, PI, R)
            state = add_tile(state, query, k, v, seen, D, TOGETHER > 1)

        own = tl.load(slots + b) * slot_stride + head.to(tl.int64) * (WINDOW.pages * PI * D)
        own += place_of(pages, WINDOW) * (PI * D)
        own_rows = tl.where(until == end, start % PI + 1, 0)
        for i in tl.range(0, own_rows, R, num_stages=1):
            seen = i + row < own_rows
            read = seen[:, None] & inside
            place = own + (i + row)[:, None] * D + channel[None, :]
            k, v = tl.load(open_k + place, mask=read, other=0.0), tl.load(open_v + place, mask=read, other=0.0)
            state = add_tile(state, query, k.to(query.dtype), v.to(query.dtype), seen, D, True)

        top, weights, found = state
        weight = tl.sum(weights, 1)
        here = (column < heads_here)[:, None] & inside
        if (mine <= begin) & (end <= stop):
            x = (found / weight[:, None]).to(out.dtype.element_ty)
            tl.store(out + rows * D + column[:, None] * D + channel[None, :], x, mask=here)
        else:
            share = partials + partial_of(group, groups, part, tl.where(begin > mine, 1, 0), SIZE)
            tl.store(share + channel[None, :] * N + column[:, None], found, mask=(column < N)[:, None] & inside)
            tl.store(share + D * N + column, top, mask=column < N)
            tl.store(share + (D + 16) * N + column, weight, mask=column < N)
            ticket = tickets + b * groups + group
            merge_if_last(out + rows * D, ticket, partials, begin, end, parts, total, group, groups, heads_here, D, N)


class RowTriton(RowReference):
    """Implements `PageKernels` for `RowFormat`. Decode of 16-bit queries is the kernel of this file.

    Prompts read copies of pages, one behind another (`dense.py`). FP32 queries, which kernels would round to FP16, go
    to the definition and keep their precision.
    """

    served_by = "triton"

    def __init__(self, fmt: RowFormat, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device)
        self._workspace = workspace

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode of 16-bit queries takes one launch, without waiting for the device."""
        if rows.q.dtype.itemsize != 2:
            return super().attend(layer, pool, spans, rows)
        check_attention(self.fmt, pool, spans, rows)
        if rows.k is not None:
            k, v = pool.planes["k"], pool.planes["v"]
            return attn_dense(pool, spans, rows, lambda ids: (k.index_select(0, ids), v.index_select(0, ids)))
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


def rows_launch(
    pool: Pool, spans: Spans, q: Tensor, out: Tensor, workspace: Workspace, tiling: RowTiling = ROW_TILING
) -> Launch:
    """The launch that writes `out`. `out` is contiguous; in `q` the heads of each sequence are contiguous."""
    k, v = pool.planes["k"], pool.planes["v"]
    heads, page_tokens, head_dim = k.shape[1:]
    group = q.shape[1] // heads
    columns = min(1 << (group - 1).bit_length(), QUERIES.value)
    groups = heads * -(-group // columns)
    programs = min(programs_per_processor(tiling.registers, tiling.warps), workspace.fitting(tiling.shared))
    parts = workspace.parts(groups, programs)
    arguments = {
        **step_arguments(k, v, pool, spans, q, out),
        "partials": workspace.partials(groups, parts, head_dim, columns),
        "tickets": workspace.tickets(q.shape[0], groups),
        "D": head_dim,
        "PI": page_tokens,
        "N": columns,
        "R": tiling.rows(head_dim),
        "STAGES": tiling.stages,
    }
    return Launch(rows_kernel, (groups, parts), arguments, tiling.warps, registers=tiling.registers)
