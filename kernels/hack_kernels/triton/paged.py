"""Decode over paged KV of any page layout: the loop that homomorphic attention and its rivals share.

A program of W warps walks through its stretch of the batch (`split.py`), W pages at a time and one per warp. It keeps a
running softmax for every warp, adds the sequence's own FP16 page, and merges. The kernel is compiled with the functions
that prepare queries and that read a page's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.own_page import own_page
from hack_kernels.triton.split import (
    OWN_UNITS,
    Workspace,
    batch_block,
    exact_pages,
    merge_if_last,
    opening_of,
    page_ends,
    partial_of,
    sequence_of,
)
from hack_kernels.triton.tiles import doubled, prefetch

WARPS: Final = 4
"""Pages that a program reads at once, each by one warp."""
REGISTERS: Final = 168
"""Registers per thread, so that three programs fit a multiprocessor: 12 pages in flight hide memory latency."""
ALL_REGISTERS: Final = 255
"""Registers per thread for kernels that need more. Without a limit the assembler may spill although some are free."""
PROCESSOR_REGISTERS: Final = 2**16
"""Registers of a multiprocessor, on every architecture that `support.py` admits."""
SPARING: Final = "--register-usage-level=4"
"""Option of ptxas: at the default of 5, ptxas looks so far ahead that a few kernels spill."""
MORE_SPARING: Final = "--register-usage-level=3"
"""The same for more than `FEW_COLUMNS` query heads."""
FEW_COLUMNS: Final = 8
REGISTERS_FOR_OUTPUTS: Final = 1024
"""Outputs (channels × queries) up to which a program fits in `REGISTERS`; with more it takes `ALL_REGISTERS`."""

LOWEST = tl.constexpr(-1e30)
"""Replaces minus infinity where two such numbers are subtracted."""


@triton.jit
def store_share(share, state, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Merges the states of W warps into `share`: outputs [D, N], then top [16, N] and weight [8, N] with equal rows."""
    top, weight, out = state
    row = tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :]
    row_of_weight = tl.arange(0, 8)[:, None] * N + tl.arange(0, N)[None, :]
    top_all = tl.max(top, 0)
    factors = tl.exp2(top - top_all[None, :])
    for m in tl.static_range(D // 16):
        tl.store(share + m * 16 * N + row, tl.sum(out[m] * factors[:, None, :], 0))
    tl.store(share + D * N + row, tl.broadcast_to(top_all[None, :], (16, N)))
    tl.store(share + (D + 16) * N + row_of_weight, tl.sum(weight * factors[:, None, :], 0))


@triton.jit
def store_outputs(out, state, heads, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Merges the states of W warps, divides by the weight and writes the query heads at `out`."""
    top, weight, found = state
    channel, head = tl.arange(0, 16)[:, None], tl.arange(0, N)[None, :]
    factors = tl.exp2(top - tl.max(top, 0)[None, :])
    total = tl.sum(doubled(weight * factors[:, None, :], W, N), 0)
    for m in tl.static_range(D // 16):
        x = tl.sum(found[m] * factors[:, None, :], 0) / total
        tl.store(out + head * D + m * 16 + channel, x.to(out.dtype.element_ty), mask=head < heads)


@triton.jit(do_not_specialize_on_alignment=["batch"])
def decode_kernel(
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
    tables,
    PREPARE: tl.constexpr,
    ADD: tl.constexpr,
    LAYOUT: tl.constexpr,
    FAR: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    D: tl.constexpr,
    PI: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_GAP: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    W: tl.constexpr,
    BY_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (HEADS · ceil(GROUP / N), parts), W warps: N query heads of a KV head, an equal share of all pages.

    PREPARE(q, LAYOUT, heads, W, N) turns a KV head's query heads into the `query` of ADD. ADD(state, keys, values,
    valid, query, LAYOUT, W, N) adds W pages to the running softmax; keys and values [W] point to them. If there are
    `tables`, `query` ends with them and with the number of the KV head.
    FAR: the number of a page is loaded two turns before the page, not one.

    keys, values: pools [pages, HEADS, ...] with strides `page_stride` and HEAD_STRIDE; table int64 [batch, ...],
    or [batch, HEADS, ...] with BY_HEAD, contiguous;
    starts, slots int64 [batch]; open_k, open_v [slots, HEADS, WINDOW.pages·PI, D]; q, out [batch, HEADS·GROUP, D],
    with Q_GAP elements between the queries of one sequence and of the next; partials FP32
    [parts, grid[0], 2, (D + 32)·N]; tickets int32 [batch, grid[0]], zero before and after.
    """
    BLOCKS: tl.constexpr = (GROUP + N - 1) // N
    group, groups = tl.program_id(0), tl.num_programs(0)
    part = tl.program_id(1)
    head = group // BLOCKS
    first_query = head * GROUP + group % BLOCKS * N
    heads_here = GROUP if BLOCKS == 1 else tl.minimum(GROUP - group % BLOCKS * N, N)
    warp = tl.arange(0, W)
    keys += head.to(tl.int64) * HEAD_STRIDE
    values += head.to(tl.int64) * HEAD_STRIDE

    EXACT: tl.constexpr = WINDOW.pages
    ends = page_ends(starts, batch, PI, BATCH, EXACT, OWN_UNITS)
    total = tl.max(ends, 0)
    parts = tl.minimum(tl.num_programs(1), total)  # no stretch is empty; the programs left over have nothing to do
    mine, stop = opening_of(part, parts, total), opening_of(part + 1, parts, total)
    past = tl.where(part < parts, sequence_of(stop - 1, ends) + 1, 0)
    # Offsets of lanes hoisted out of this loop would fill the registers that the pages need.
    for b in tl.range(sequence_of(mine, ends), past, disable_licm=True):
        start = tl.load(starts + b).to(tl.int32)
        pages = start // PI
        if EXACT > 1:
            pages = tl.maximum(pages - (EXACT - 1), 0)
        end = tl.max(tl.where(tl.arange(0, BATCH) == b, ends, 0), 0)
        begin = end - pages - EXACT * OWN_UNITS
        at, until = tl.maximum(mine, begin), tl.minimum(stop, end)
        rows = b * (HEADS * GROUP) + first_query
        queries = q + (rows * D + b * Q_GAP)
        query = PREPARE(queries, LAYOUT, heads_here, W, N)
        if tables is not None:
            query = query + (tables, head)
        zeros = ()
        for _ in tl.static_range(D // 16):
            zeros = zeros + (tl.zeros((W, 16, N), tl.float32),)
        state = (tl.full((W, N), LOWEST, tl.float32), tl.zeros((W, 8, N), tl.float32), zeros)

        last = tl.minimum(until - begin, pages)
        entry = table + b * table_stride
        if BY_HEAD:
            entry += head * (table_stride // HEADS)
        if WINDOW.sink > 0:
            entry += WINDOW.sink
        # In a batch a page's bytes are asked for one turn before it is read, and its number two turns before.
        # A sequence alone was no faster with that on an H200. Numbers of pages fit 32 bits.
        index = tl.minimum(at - begin + warp, last - 1)
        page = tl.load(entry + index, mask=index >= 0, other=0).to(tl.int32)
        if FAR:
            index = tl.minimum(index + W, last - 1)
            following = tl.load(entry + index, mask=index >= 0, other=0).to(tl.int32)
        for i in range(at - begin, last, W):
            place = page.to(tl.int64) * page_stride
            if FAR:
                page = following
                following = tl.load(entry + tl.minimum(i + 2 * W + warp, last - 1)).to(tl.int32)
            else:
                page = tl.load(entry + tl.minimum(i + W + warp, last - 1)).to(tl.int32)
            if BATCH > 1:
                prefetch(keys + page.to(tl.int64) * page_stride, LAYOUT.nbytes)
            state = ADD(state, keys + place, values + place, i + warp < last, query, LAYOUT, W, N)
        # Without a window the own page is the only exact one, and ends where the sequence's stretch does.
        first_exact, past_exact, reads_exact = 0, 1, until == end
        if EXACT > 1:
            first_exact, past_exact = exact_pages(at - begin - pages), exact_pages(until - begin - pages)
            reads_exact = first_exact < past_exact
        if reads_exact:
            own = tl.load(slots + b) * slot_stride + head.to(tl.int64) * (EXACT * PI * D)
            exact = open_k + own, open_v + own
            state = own_page(state, queries, exact, start, first_exact, past_exact, heads_here, D, PI, W, N, WINDOW)

        if (mine <= begin) & (end <= stop):
            store_outputs(out + rows * D, state, heads_here, D, W, N)
        else:
            SIZE: tl.constexpr = (D + 32) * N
            slot = tl.where(begin > mine, 1, 0)
            store_share(partials + partial_of(group, groups, part, slot, SIZE), state, D, W, N)
            ticket = tickets + b * groups + group
            merge_if_last(out + rows * D, ticket, partials, begin, end, parts, total, group, groups, heads_here, D, N)


class PoolLayout(Protocol):
    """The frame's view of how a kind of page rests. Each value of it has a compiled kernel of its own."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def page_tokens(self) -> int:
        """Π."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page of one KV head, K and V together."""

    @property
    def head_stride(self) -> int:
        """Elements of a pool from one KV head's page to the next head's."""


@dataclass(frozen=True, slots=True)
class PageReader:
    """The parts that a kind of page adds to the frame: two device functions (see `decode_kernel`), layout, settings."""

    prepare: Any
    add: Any
    layout: PoolLayout
    registers: int = REGISTERS
    few_columns: bool = False
    """Whether its state per query head leaves no registers for outputs beyond `REGISTERS_FOR_OUTPUTS`."""
    sparing: bool = True
    """Whether it is assembled with `SPARING` if it has `ALL_REGISTERS`."""
    assembler: str | None = None
    """Options of ptxas if it has fewer registers."""
    looks_far: bool = True
    """Whether it has registers for the number of a page two turns ahead. Only batches use them."""


def paged_launch(
    reader: PageReader,
    keys: Tensor,
    values: Tensor,
    pool: Pool,
    spans: Spans,
    q: Tensor,
    out: Tensor,
    workspace: Workspace,
    tables: Tensor | None = None,
) -> Launch:
    """The launch that writes `out` [B, Hq, D], contiguous; in `q` each sequence's heads are too (`rows_of_heads`).

    keys, values: planes of `pool` with strides (any, head_stride). tables: what `reader` needs beside the pages.
    """
    heads = keys.shape[1]
    group = q.shape[1] // heads
    columns = query_columns(reader.layout.head_dim, group, few=reader.few_columns)
    groups = heads * -(-group // columns)
    registers = reader.registers if columns * reader.layout.head_dim <= REGISTERS_FOR_OUTPUTS else ALL_REGISTERS
    parts = workspace.parts(groups, programs_per_processor(registers))
    arguments = {
        **step_arguments(keys, values, pool, spans, q, out),
        "partials": workspace.partials(groups, parts, reader.layout.head_dim, columns),
        "tickets": workspace.tickets(q.shape[0], groups),
        "tables": tables,
        "PREPARE": reader.prepare,
        "ADD": reader.add,
        "LAYOUT": reader.layout,
        "FAR": reader.looks_far and q.shape[0] > 1,
        "HEAD_STRIDE": reader.layout.head_stride,
        "D": reader.layout.head_dim,
        "PI": reader.layout.page_tokens,
        "N": columns,
        "W": WARPS,
    }
    assembler = reader.assembler
    if registers == ALL_REGISTERS:
        more = SPARING if columns <= FEW_COLUMNS else MORE_SPARING
        assembler = more if reader.sparing else None
    return Launch(decode_kernel, (groups, parts), arguments, WARPS, registers=registers, assembler=assembler)


def step_arguments(keys: Tensor, values: Tensor, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> dict[str, Any]:
    """The arguments that all kernels of a decode step share, however they read pages; see `decode_kernel`."""
    batch, heads, table = q.shape[0], keys.shape[1], spans.table.contiguous()
    return {
        "keys": keys,
        "values": values,
        "page_stride": keys.stride(0),
        "table": table,
        "table_stride": table.stride(0),
        "starts": spans.starts,
        "slots": spans.slots,
        "batch": batch,
        "open_k": pool.open_k,
        "open_v": pool.open_v,
        "slot_stride": pool.open_k.stride(0),
        "q": q,
        "out": out,
        "HEADS": heads,
        "GROUP": q.shape[1] // heads,
        "Q_GAP": q.stride(0) - q.shape[1] * q.shape[2],
        "BATCH": batch_block(batch),
        "BY_HEAD": table.dim() == 3,
        "WINDOW": pool.window,
    }


def rows_of_heads(q: Tensor) -> Tensor:
    """Queries [B, Hq, D] as kernels read them: each sequence's heads contiguous, with any stride between sequences.

    So queries that lie beside keys and values in the rows of one product are not copied.
    """
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def programs_per_processor(registers: int, warps: int = WARPS) -> int:
    """Programs that fit a multiprocessor at a time, given registers per thread, which are allocated in eights."""
    return PROCESSOR_REGISTERS // (warps * 32 * -(-registers // 8) * 8)


def query_columns(head_dim: int, group: int, *, few: bool) -> int:
    """Query heads that one program takes: the group padded to a power of two, as far as registers reach."""
    most = 8 if head_dim > 128 or (few and head_dim > 64) else 16
    return min(1 << (group - 1).bit_length(), most)
