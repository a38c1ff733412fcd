"""Homomorphic attention of one query per sequence: packed codes against 8-bit Q and P, page after page.

A warp takes one page of one KV head, and all query heads that share it are the columns of every product. A page costs
two loads of 16 bytes per 1024 codes, one mask per four codes and one matrix instruction per 512 codes and 8 queries;
Eq. (4) of the paper is then evaluated in FP32. Scores never leave registers.

`split.py` divides the pages of a batch among the programs and merges what they found.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import HackFormat, HackPages, Spans
from hack_kernels.triton.fragments import field, load_row, load_sums, load_tile, load_unit
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import check_records, page_layout
from hack_kernels.triton.own_page import LOG2_E, add_rows, exact_scores, scaled_query
from hack_kernels.triton.split import OWN_UNITS, Workspace, merged, page_ends, part_of, partial_of, sequence_of

WARPS: Final = 4
"""Pages that a program reads at once, each by one warp."""
REGISTERS: Final = 168
"""Per thread, so that three programs run on a multiprocessor: 12 pages on their way hide the latency of memory."""

LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity where a difference of two of them is taken."""
ROUND = tl.constexpr(12582912.0)
"""1.5·2^23: added to a small FP32, its low byte is the nearest integer."""


@triton.jit
def quantized_partition(q, p: tl.constexpr, layout: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """One partition of Q as `reference.quantize_query` has it.

    Returns codes (a tuple over 32 channels of int8 [W, 32, N]); and of [N] each: scale, minimum, the constant that goes
    with K's minimum, and the sum of codes, INT32. Scores are wanted in units of log2.
    """
    D: tl.constexpr = layout.fmt.head_dim
    Z: tl.constexpr = layout.fmt.k_partition
    low = tl.full((N,), float("inf"), tl.float32)
    high = tl.full((N,), float("-inf"), tl.float32)
    for step in tl.static_range(Z // 32):
        x = scaled_query(q, p * Z + step * 32, heads, D, N)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    if layout.asymmetric:
        scale = tl.div_rn(high - low, tl.full((N,), 255.0, tl.float32))
    else:
        scale = tl.div_rn(tl.maximum(high, -low), tl.full((N,), 127.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    codes = ()
    sums = tl.zeros((N,), tl.int32)
    for step in tl.static_range(Z // 32):
        x = scaled_query(q, p * Z + step * 32, heads, D, N)
        divisor = tl.broadcast_to(scale[None, :], (32, N))
        if layout.asymmetric:
            levels = tl.minimum(tl.floor(tl.div_rn(x - low[None, :], divisor) + 0.5), 255.0) - 128.0
        else:
            levels = tl.minimum(tl.maximum(tl.floor(tl.div_rn(x, divisor) + 0.5), -127.0), 127.0)
        sums += tl.sum(levels, 0).to(tl.int32)
        codes = codes + (tl.broadcast_to(levels.to(tl.int8)[None, :, :], (W, 32, N)),)
    minimum = (low + 128.0 * scale) * LOG2_E
    scale = scale * LOG2_E
    constant = scale * sums.to(tl.float32)
    if layout.asymmetric:
        constant += Z * minimum
    return codes, scale, minimum, constant, sums


@triton.jit
def quantized_query(q, layout: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """All partitions of the query heads at `q`."""
    query = ()
    for p in tl.static_range(tl.constexpr(layout.fmt.k_groups)):
        query = query + (quantized_partition(q, p, layout, heads, W, N),)
    return query


@triton.jit
def add_partition(
    score, record, tiles, part, layout: tl.constexpr, m: tl.constexpr, p: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """Eq. (4) over partition `p` for the keys of token tile `m`, added to their scores FP32 [W, 16, N]."""
    codes, q_scale, q_minimum, constant, q_sums = part
    across: tl.constexpr = layout.k_tiles.grid[1]
    bits: tl.constexpr = layout.k_tiles.bits
    row_fields: tl.constexpr = layout.k_tiles.row_fields
    column_fields: tl.constexpr = layout.k_tiles.column_fields
    steps: tl.constexpr = layout.fmt.k_partition // 32
    unit: tl.constexpr = p * (layout.fmt.page_tokens // 16) + m
    f: tl.constexpr = (p * steps) % column_fields * row_fields + m % row_fields
    last: tl.constexpr = f == layout.k_tiles.fields - 1
    flipped = q_sums * 128 if last else q_sums * 0
    dot = tl.broadcast_to(flipped[None, None, :], (W, 16, N))
    for step in tl.static_range(steps):
        tile = tiles[m // row_fields * across + (p * steps + step) // column_fields]
        dot = tl.dot(field(tile, f, bits), codes[step], dot)
    x = dot.to(tl.float32) * (q_scale * 2.0 ** (-bits * f))[None, None, :]
    if layout.asymmetric:
        if layout.fmt.stored_sums:
            sums = load_sums(record + layout.k_sums, layout.wide_k_sums, unit, W).to(tl.float32)[:, :, None]
        else:
            counted = tl.full((W, 16, N), layout.fmt.k_partition * 128 if last else 0, tl.int32)
            for step in tl.static_range(steps):
                tile = tiles[m // row_fields * across + (p * steps + step) // column_fields]
                counted = tl.dot(field(tile, f, bits), tl.full((W, 32, N), 1, tl.int8), counted)
            sums = counted.to(tl.float32) * 2.0 ** (-bits * f)
        x += sums * q_minimum[None, None, :]
    scale, minimum = load_unit(record + layout.k_meta, unit, W)
    score += scale[:, :, None] * x
    return score + minimum[:, :, None] * constant[None, None, :]


@triton.jit
def page_scores(record, query, layout: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores of W pages at `record` [W], in units of log2: a tuple over token tiles of FP32 [W, 16, N]."""
    tiles = ()
    for i in tl.static_range(tl.constexpr(layout.k_tiles.grid[0] * layout.k_tiles.grid[1])):
        tiles = tiles + (load_tile(record, i, W),)
    scores = ()
    for m in tl.static_range(tl.constexpr(layout.fmt.page_tokens // 16)):
        score = tl.zeros((W, 16, N), tl.float32)
        for p in tl.static_range(tl.constexpr(layout.fmt.k_groups)):
            score = add_partition(score, record, tiles, query[p], layout, m, p, W, N)
        scores = scores + (score,)
    return scores


@triton.jit
def top_of(scores):
    """Largest score of every page and query: a tuple of [W, 16, N] -> [W, N]."""
    top = scores[0]
    for m in tl.static_range(1, tl.constexpr(len(scores))):
        top = tl.maximum(top, scores[m])
    return tl.max(top, 1)


@triton.jit
def in_token_order(x, layout: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """A tuple of token tiles [W, 16, N] -> [W, Π, N]."""
    if len(x) == 2:
        joined = tl.permute(tl.join(x[0], x[1]), (0, 3, 1, 2))
    elif len(x) == 4:
        joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))  # [W, 16, N, 2 of 32 tokens, 2 of 16]
        joined = tl.permute(joined, (0, 3, 4, 1, 2))
    else:
        low = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        high = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
        joined = tl.permute(tl.join(low, high), (0, 3, 4, 5, 1, 2))
    return tl.reshape(joined, (W, layout.fmt.page_tokens, N))


@triton.jit
def quantized_weights(scores, top, layout: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """exp2(scores - top) in 8 bits: codes int8 [W, Π, N], and scale and minimum [W, N] of the page.

    Asymmetric codes 0..255 are returned less 128.
    """
    weights = ()
    for m in tl.static_range(tl.constexpr(len(scores))):
        weights = weights + (tl.exp2(scores[m] - top[:, None, :]),)
    if layout.asymmetric:
        lowest = weights[0]
        for m in tl.static_range(1, tl.constexpr(len(scores))):
            lowest = tl.minimum(lowest, weights[m])
        low = tl.min(lowest, 1)
        scale = (1.0 - low) * (1.0 / 255)
        scale = tl.where(scale == 0.0, 1.0, scale)
        factor, origin = 1.0 / scale, ROUND - 128.0
    else:
        scale = tl.full((W, N), 1.0 / 127, tl.float32)
        factor, origin = tl.full((W, N), 127.0, tl.float32), ROUND + 0.0
        low = tl.zeros((W, N), tl.float32)
    codes = ()
    for m in tl.static_range(tl.constexpr(len(scores))):
        rounded = (weights[m] - low[:, None, :]) * factor[:, None, :] + origin
        codes = codes + (rounded.to(tl.int32, bitcast=True).to(tl.int8),)
    return in_token_order(codes, layout, W, N), scale, low


@triton.jit
def add_channels(
    out, record, tiles, weights, kept, terms, layout: tl.constexpr, m: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """Eq. (4) of P·V for channel tile `m`, added to its outputs FP32 [W, 16, N]."""
    p_sums, p_scale, p_minimum, p_total = terms
    PI: tl.constexpr = layout.fmt.page_tokens
    bits: tl.constexpr = layout.v_tiles.bits
    f: tl.constexpr = m % layout.v_tiles.fields
    last: tl.constexpr = f == layout.v_tiles.fields - 1
    codes = field(tiles[m // layout.v_tiles.fields], f, bits)
    flipped = p_sums * 128 if last else p_sums * 0
    if layout.asymmetric:
        # P's codes are signed for the product only; as 0..255 again, the terms of Eq. (4) do not cancel in FP32.
        if layout.fmt.stored_sums:
            sums = load_sums(record + layout.v_sums, layout.wide_v_sums, m, W)[:, :, None] << (bits * f)
        else:
            sums = tl.full((W, 16, N), PI * 128 if last else 0, tl.int32)
            sums = tl.dot(codes, tl.full((W, PI, N), 1, tl.int8), sums)
        dot = tl.dot(codes, weights, flipped + sums * 128)
        x = dot.to(tl.float32) * (p_scale * 2.0 ** (-bits * f))[:, None, :]
        x += sums.to(tl.float32) * (p_minimum * 2.0 ** (-bits * f))[:, None, :]
    else:
        dot = tl.dot(codes, weights, flipped)
        x = dot.to(tl.float32) * (p_scale * 2.0 ** (-bits * f))[:, None, :]
    scale, minimum = load_unit(record + layout.v_meta, m, W)
    out = out * kept[:, None, :] + scale[:, :, None] * x
    return out + minimum[:, :, None] * p_total


@triton.jit
def add_pages(state, record, valid, query, layout: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """W pages at `record` [W] added to the running softmax: (largest score [W, N], weight [W, 16, N], outputs)."""
    top, weight, out = state
    PI: tl.constexpr = layout.fmt.page_tokens
    down: tl.constexpr = layout.v_tiles.grid[0]
    across: tl.constexpr = layout.v_tiles.grid[1]
    scores = page_scores(record, query, layout, W, N)
    page_top = top_of(scores)
    counted_top = tl.where(valid[:, None], page_top, LOWEST)
    new_top = tl.maximum(top, counted_top)
    kept = tl.exp2(top - new_top)
    share = tl.where(valid[:, None], tl.exp2(counted_top - new_top), 0.0)

    weights, p_scale, p_minimum = quantized_weights(scores, page_top, layout, W, N)
    p_scale, p_minimum = p_scale * share, p_minimum * share
    # A product with ones sums the weights in the place and layout in which they are wanted.
    p_sums = tl.dot(tl.full((W, 16, PI), 1, tl.int8), weights, tl.zeros((W, 16, N), tl.int32))
    if layout.asymmetric:
        p_total = (p_sums + 128 * PI).to(tl.float32) * p_scale[:, None, :] + (PI * p_minimum)[:, None, :]
    else:
        p_total = p_sums.to(tl.float32) * p_scale[:, None, :]
    terms = (p_sums, p_scale, p_minimum, p_total)

    tiles = ()
    for j in tl.static_range(down):
        tiles = tiles + (load_row(record + layout.v_codes, j, across, W),)
    added = ()
    for m in tl.static_range(tl.constexpr(layout.v_units)):
        added = added + (add_channels(out[m], record, tiles, weights, kept, terms, layout, m, W, N),)
    return new_top, weight * kept[:, None, :] + p_total, added


@triton.jit
def own_page(state, q, open_k, open_v, own_rows, layout: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """The first `own_rows` rows of the open page added to the running softmax, 16·W rows at a time."""
    D: tl.constexpr = layout.fmt.head_dim
    for begin in range(0, own_rows, 16 * W):
        block = begin // 16 + tl.arange(0, W)
        seen = block[:, None] * 16 + tl.arange(0, 16)[None, :] < own_rows
        scores = exact_scores(q, heads, open_k, block, seen, D, W, N)
        state = add_rows(state, scores, open_v, block, seen, D, W, N)
    return state


@triton.jit
def store_share(share, state, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """What W warps found, merged, to `share`: outputs [D, N], then top and weight [16, N] with equal rows."""
    top, weight, out = state
    row = tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :]
    top_all = tl.max(top, 0)
    factors = tl.exp2(top - top_all[None, :])
    for m in tl.static_range(D // 16):
        tl.store(share + m * 16 * N + row, tl.sum(out[m] * factors[:, None, :], 0))
    tl.store(share + D * N + row, tl.broadcast_to(top_all[None, :], (16, N)))
    tl.store(share + (D + 16) * N + row, tl.sum(weight * factors[:, None, :], 0))


@triton.jit
def store_outputs(out, state, heads, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """What W warps found, merged and divided by its weight, to the query heads at `out`."""
    top, weight, found = state
    channel, head = tl.arange(0, 16)[:, None], tl.arange(0, N)[None, :]
    factors = tl.exp2(top - tl.max(top, 0)[None, :])
    total = tl.sum(weight * factors[:, None, :], 0)
    for m in tl.static_range(D // 16):
        x = tl.sum(found[m] * factors[:, None, :], 0) / total
        tl.store(out + head * D + m * 16 + channel, x.to(out.dtype.element_ty), mask=head < heads)


@triton.jit
def decode_kernel(
    records,
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
    layout: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    W: tl.constexpr,
):
    """Grid (HEADS · ceil(GROUP / N), parts), W warps: N query heads of a KV head, an equal share of all pages.

    records uint8 [pages, HEADS, layout.nbytes] with a stride of `page_stride`; table int64 [batch, ...]; starts, slots
    int64 [batch]; open_k, open_v FP16 [slots, HEADS, Π, D]; q, out [batch, HEADS·GROUP, D]; partials FP32
    [parts, grid[0], 2, (D + 32)·N]; tickets int32 [batch, grid[0]], zero before and after.
    """
    D: tl.constexpr = layout.fmt.head_dim
    PI: tl.constexpr = layout.fmt.page_tokens
    BLOCKS: tl.constexpr = (GROUP + N - 1) // N
    group, groups = tl.program_id(0), tl.num_programs(0)
    part = tl.program_id(1)
    head = group // BLOCKS
    first_query = head * GROUP + group % BLOCKS * N
    heads_here = GROUP if BLOCKS == 1 else tl.minimum(GROUP - group % BLOCKS * N, N)
    warp = tl.arange(0, W)
    records += head.to(tl.int64) * layout.nbytes

    ends = page_ends(starts, batch, PI, BATCH)
    total = tl.max(ends, 0)
    parts = tl.minimum(tl.num_programs(1), total)  # no stretch is empty; the programs left over have nothing to do
    mine, stop = part * total // parts, (part + 1) * total // parts
    past = tl.where(part < parts, sequence_of(stop - 1, ends) + 1, 0)
    # Offsets of lanes hoisted out of this loop would fill the registers that the pages need.
    for b in tl.range(sequence_of(mine, ends), past, disable_licm=True):
        start = tl.load(starts + b)
        pages = start // PI
        end = tl.max(tl.where(tl.arange(0, BATCH) == b, ends, 0), 0)
        begin = end - pages - OWN_UNITS
        at, until = tl.maximum(mine, begin), tl.minimum(stop, end)
        rows = b * (HEADS * GROUP) + first_query
        query = quantized_query(q + rows * D, layout, heads_here, W, N)
        zeros = ()
        for _ in tl.static_range(D // 16):
            zeros = zeros + (tl.zeros((W, 16, N), tl.float32),)
        state = (tl.full((W, N), LOWEST, tl.float32), tl.zeros((W, 16, N), tl.float32), zeros)

        last = tl.minimum(until - begin, pages)
        entry = table + b * table_stride
        index = tl.minimum(at - begin + warp, pages - 1)
        page = tl.load(entry + index, mask=index >= 0, other=0)
        for i in range(at - begin, last, W):
            record = records + page * page_stride
            valid = i + warp < last
            page = tl.load(entry + tl.minimum(i + W + warp, pages - 1))
            state = add_pages(state, record, valid, query, layout, W, N)
        if until == end:
            place = tl.load(slots + b) * slot_stride + head.to(tl.int64) * (PI * D)
            own_rows = (start % PI + 1).to(tl.int32)
            state = own_page(state, q + rows * D, open_k + place, open_v + place, own_rows, layout, heads_here, W, N)

        first = part_of(begin, parts, total)
        count = part_of(end - 1, parts, total) - first + 1
        if count == 1:
            store_outputs(out + rows * D, state, heads_here, D, W, N)
        else:
            SIZE: tl.constexpr = (D + 32) * N
            slot = tl.where(begin > mine, 1, 0)
            store_share(partials + partial_of(group, groups, part, slot, SIZE), state, D, W, N)
            tl.debug_barrier()
            ticket = tickets + b * groups + group
            if tl.atomic_add(ticket, 1, sem="acq_rel") == count - 1:
                opens_inside = tl.where(begin > first * total // parts, 1, 0)
                found, weight = merged(partials, first, count, group, groups, opens_inside, D, N, W)
                channel, column = tl.arange(0, triton.next_power_of_2(D))[:, None], tl.arange(0, N)[None, :]
                x = (found / weight[None, :]).to(out.dtype.element_ty)
                seen = (column < heads_here) & (channel < D)
                tl.store(out + rows * D + column * D + channel, x, mask=seen)
                tl.store(ticket, 0)


def attn_decode(
    fmt: HackFormat, pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor, workspace: Workspace
) -> Tensor:
    """`HackKernels.attn_decode` for `OpenPage.EXACT` in one launch, without a word to or from the host."""
    check_records(fmt, pages)
    q = q.contiguous()
    out = torch.empty_like(q)
    decode_launch(fmt, pages, open_k, open_v, spans, q, out, workspace).run()
    return out


def decode_launch(
    fmt: HackFormat,
    pages: HackPages,
    open_k: Tensor,
    open_v: Tensor,
    spans: Spans,
    q: Tensor,
    out: Tensor,
    workspace: Workspace,
) -> Launch:
    """The launch that writes `out`; `q` and `out` are contiguous."""
    batch, heads = q.shape[0], pages["k_codes"].shape[1]
    group = q.shape[1] // heads
    columns = query_columns(fmt.head_dim, group)
    groups = heads * -(-group // columns)
    parts = workspace.parts(groups)
    arguments = {
        "records": pages["k_codes"],
        "page_stride": pages["k_codes"].stride(0),
        "table": spans.table,
        "table_stride": spans.table.stride(0),
        "starts": spans.starts,
        "slots": spans.slots,
        "batch": batch,
        "open_k": open_k,
        "open_v": open_v,
        "slot_stride": open_k.stride(0),
        "q": q,
        "out": out,
        "partials": workspace.partials(groups, parts, fmt.head_dim, columns),
        "tickets": workspace.tickets(batch, groups),
        "layout": page_layout(fmt),
        "HEADS": heads,
        "GROUP": group,
        "N": columns,
        "BATCH": triton.next_power_of_2(batch),
        "W": WARPS,
    }
    registers = REGISTERS if columns * fmt.head_dim <= 1024 else None
    return Launch(decode_kernel, (groups, parts), arguments, warps=WARPS, registers=registers)


def query_columns(head_dim: int, group: int) -> int:
    """Query heads that one program takes: the group padded to a power of two, as far as registers reach."""
    most = 8 if head_dim > 128 else 16
    return min(1 << (group - 1).bit_length(), most)
