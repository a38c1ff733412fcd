"""Homomorphic attention of many rows per sequence: INT8 dots over sealed pages, the own page as `OpenPage` says.

A program computes one tile: the query heads of one KV head for a few consecutive tokens that lie in one page. So every
earlier page is seen whole, and only the own page needs a mask. Tiles are counted on the device, so the host reads
neither lengths nor order of the batch. The grid is an upper bound, and programs past the last tile return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.code_tiles import padded
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import page_layout
from hack_kernels.triton.own_page import place_of
from hack_kernels.triton.paged import ALL_REGISTERS, PoolLayout
from hack_kernels.triton.prefill_own import add_rows, code_scores, exact_scores
from hack_kernels.triton.prefill_sealed import add_page
from hack_kernels.triton.prefill_tiling import Tiling, channels_of, tiling_of
from hack_kernels.triton.query import query_rows
from hack_kernels.triton.split import batch_block


@triton.jit
def locate(starts, counts, batch, BATCH: tl.constexpr, TOKENS: tl.constexpr):
    """The sequence of this program's tile, or -1 past the end, and its first token. A sequence's last tiles come
    first."""
    order = tl.arange(0, BATCH)
    start = tl.load(starts + order, mask=order < batch, other=0).to(tl.int32)
    count = tl.load(counts + order, mask=order < batch, other=0).to(tl.int32)
    tiles = tl.where(count > 0, (start + count - 1) // TOKENS - start // TOKENS + 1, 0)
    ends = tl.cumsum(tiles, 0)
    index = tl.sum(tiles, 0) - 1 - tl.program_id(0)
    sequence = tl.sum((ends <= index).to(tl.int32), 0)
    before = tl.sum(tl.where(order < sequence, tiles, 0), 0)
    first = tl.sum(tl.where(order == sequence, start // TOKENS, 0), 0)
    return tl.where(index < 0, -1, sequence), (first + index - before) * TOKENS


@triton.jit(do_not_specialize=["layer", "head_start", "seed"], do_not_specialize_on_alignment=["batch"])
def prefill_kernel(
    q,
    k,
    v,
    out,
    open_k,
    open_v,
    records,
    starts,
    counts,
    offsets,
    table,
    slots,
    batch,
    q_stride,
    row_stride,
    slot_stride,
    open_head_stride,
    page_stride,
    table_stride,
    layer,
    head_start,
    seed,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BATCH: tl.constexpr,
    EXACT_QK: tl.constexpr,
    TILING: tl.constexpr,
    LAYOUT: tl.constexpr,
    BY_HEAD: tl.constexpr,
    PREPARE: tl.constexpr,
    ADD: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (tiles, KV heads, parts of V). Rows of a tile are (token, query head), heads padded to GROUP_PAD.

    PREPARE(q_rows, seen_rows, LAYOUT) turns rows of queries into the `query` of ADD. ADD(state, query, record,
    first_block, TILING, LAYOUT) adds a sealed page to the running softmax.

    table int64 [batch, ...], or [batch, KV heads, ...] with BY_HEAD, contiguous.
    """
    ROWS: tl.constexpr = TOKENS * GROUP_PAD
    PI: tl.constexpr = LAYOUT.page_tokens
    BLOCKS: tl.constexpr = TILING.blocks
    CHANNELS: tl.constexpr = TILING.channels
    sequence, first = locate(starts, counts, batch, BATCH, TOKENS)
    if sequence < 0:
        return
    head = tl.program_id(1)
    first_block = tl.program_id(2) * BLOCKS if TILING.parts > 1 else 0
    start = tl.load(starts + sequence).to(tl.int32)
    end = start + tl.load(counts + sequence).to(tl.int32)
    shift = tl.load(offsets + sequence) - start  # from positions to rows of the batch
    own_page = first // PI

    row = tl.arange(0, ROWS)
    position, member = first + row // GROUP_PAD, row % GROUP_PAD
    seen_rows = (position >= start) & (position < end) & (member < GROUP)
    tile = (shift + first) * q_stride + head * (GROUP * LAYOUT.head_dim)
    at = row // GROUP_PAD * q_stride + member * LAYOUT.head_dim  # from the tile's first row, so 32 bits are enough
    query = PREPARE(q + tile + at, seen_rows, LAYOUT)
    outputs = ()
    for _ in tl.static_range(BLOCKS):
        outputs = outputs + (tl.zeros((ROWS, CHANNELS), tl.float32),)
    state = (tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), outputs)

    entry = table + sequence.to(tl.int64) * table_stride
    if BY_HEAD:
        entry += head * (table_stride // tl.num_programs(1))
    coded = own_page
    if WINDOW.pages > 1:
        coded = tl.maximum(own_page - (WINDOW.pages - 1), 0)
        entry += WINDOW.sink
    for page in range(coded):
        page_id = tl.load(entry + page)
        record = records + page_id * page_stride + head * LAYOUT.nbytes
        state = ADD(state, query, record, first_block, TILING, LAYOUT)

    open_at = tl.load(slots + sequence) * slot_stride + head * open_head_stride
    if WINDOW.pages == 1:
        open_at -= (start // PI * PI).to(tl.int64) * LAYOUT.head_dim
    batch_at = shift * row_stride + head * LAYOUT.head_dim
    open_k, open_v, k, v = open_k + open_at, open_v + open_at, k + batch_at, v + batch_at
    last = tl.minimum(first + TOKENS, end)
    for place in tl.range(coded * PI, last, TILING.own_rows, num_stages=1):
        token = place + tl.arange(0, TILING.own_rows)
        if WINDOW.pages > 1:
            # Sinks come first; the pages between them and the others were read as codes.
            page = place // PI
            page = tl.where(page < coded + tl.minimum(WINDOW.sink, own_page), page - coded, page)
            token = page * PI + place % PI + tl.arange(0, TILING.own_rows)
            moved = (place_of(page, WINDOW) - page) * (PI * LAYOUT.head_dim)
            early_k, early_v = open_k + moved, open_v + moved
        else:
            early_k, early_v = open_k, open_v
        if LAYOUT.own_codes:
            model_head = head_start + head
            scores = code_scores(query, early_k, k, token, start, end, row_stride, model_head, layer, seed, LAYOUT)
        else:
            scores = exact_scores(q + tile + at, seen_rows, early_k, k, token, start, end, row_stride, EXACT_QK, LAYOUT)
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        state = add_rows(state, scores, early_v, v, token, start, end, row_stride, first_block, TILING, LAYOUT)

    _, total, outputs = state
    V: tl.constexpr = LAYOUT.v_tiles
    for block in tl.static_range(BLOCKS):
        channel = channels_of(first_block + block, TILING, V)
        seen = seen_rows[:, None] & (channel < LAYOUT.head_dim)[None, :]
        x = (outputs[block] / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + tile + at[:, None] + channel[None, :], x, mask=seen)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """The parts that a kind of page adds to the frame: two device functions (see `prefill_kernel`), layout, tiling."""

    prepare: Any
    add: Any
    layout: PoolLayout
    tiling: Tiling
    seed: int = 0
    records: str = "k_codes"
    """The plane with which records begin."""


def attn_prefill(fmt: HackFormat, layer: int, pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`PageKernels.attend` of a batch with rows k, v. Checks are the caller's; nothing is read on the host."""
    return attn_prompt(reader_of(fmt, q.dtype), layer, pool, spans, q, k, v)


def attn_prompt(reader: PromptReader, layer: int, pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attn_prefill` of any kind of page."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    prompt_launch(reader, layer, pool, spans, q, k, v, out).run()
    return out


def reader_of(fmt: HackFormat, dtype: torch.dtype) -> PromptReader:
    """The reader of pages of codes with minima, for queries of `dtype`."""
    return PromptReader(query_rows, add_page, page_layout(fmt), tiling_of(fmt, dtype), fmt.seed)


def prefill_launch(
    fmt: HackFormat, layer: int, pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Launch:
    """`prompt_launch` for pages of codes with minima."""
    return prompt_launch(reader_of(fmt, q.dtype), layer, pool, spans, q, k, v, out)


def prompt_launch(
    reader: PromptReader, layer: int, pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Launch:
    """The launch that writes `out`; q, k, v and out are contiguous."""
    records, table, tiling = pool.planes[reader.records], spans.table.contiguous(), reader.tiling
    tokens = min(pool.page_tokens, max(1, tiling.rows // padded(q.shape[1] // k.shape[1])))
    arguments = {
        **tile_arguments(pool, spans, q, k, v, out, tokens),
        "records": records,
        "table": table,
        "page_stride": records.stride(0),
        "table_stride": table.stride(0),
        "layer": layer,
        "head_start": pool.head_start,
        "seed": reader.seed,
        "EXACT_QK": "tf32x3" if q.dtype is torch.float32 else "tf32",  # TF32 holds FP16 and BF16 exactly
        "TILING": tiling,
        "LAYOUT": reader.layout,
        "BY_HEAD": table.dim() == 3,
        "PREPARE": reader.prepare,
        "ADD": reader.add,
    }
    grid = (most_tiles(q, spans, tokens), k.shape[1], tiling.parts)
    return Launch(prefill_kernel, grid, arguments, tiling.warps, registers=ALL_REGISTERS)


def tile_arguments(
    pool: Pool, spans: Spans, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tokens: int
) -> dict[str, Any]:
    """The arguments that all kernels of prompts in tiles of `tokens` tokens share, however they read sealed pages. q,
    k, v and out are contiguous."""
    batch, group = spans.starts.numel(), q.shape[1] // k.shape[1]
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "open_k": pool.open_k,
        "open_v": pool.open_v,
        "starts": spans.starts,
        "counts": spans.counts,
        "offsets": spans.offsets,
        "slots": spans.slots,
        "batch": batch,
        "q_stride": q.stride(0),
        "row_stride": k.stride(0),
        "slot_stride": pool.open_k.stride(0),
        "open_head_stride": pool.open_k.stride(1),
        "GROUP": group,
        "GROUP_PAD": padded(group),
        "TOKENS": tokens,
        "BATCH": batch_block(batch),
        "WINDOW": pool.window,
    }


def most_tiles(q: Tensor, spans: Spans, tokens: int) -> int:
    """An upper bound of tiles of `tokens` tokens: a span touches at most two that it does not fill."""
    return min(q.shape[0], q.shape[0] // tokens + 2 * spans.starts.numel())
