"""Homomorphic attention of many rows per sequence: INT8 dots over sealed pages, the own page as `OpenPage` says.

A program computes one tile: the query heads of one KV head for a few consecutive tokens that lie in one page. So every
page before is seen whole, without a mask, and only the own page needs one. Tiles are counted on the device, so that
neither lengths nor order of the batch are read on the host; the grid is an upper bound, and programs past it return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import HackFormat, HackPages, Spans
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import TILE_BYTES
from hack_kernels.triton.quantize import codes_of, divided, extremes, noise_of, query_codes, scale_of
from hack_kernels.triton.shape import padded, shape_of
from hack_kernels.triton.tiles import (
    bytes_sum,
    field_of,
    linear,
    load_codes,
    load_meta,
    sums_of,
    sums_pointer,
    unit_place,
)

TILE_ROWS: Final = 32
"""Query rows of a program; half of it for rows twice as wide, in channels or in bytes, and for two warps. 64 rows and
Hopper's wider INT8 products would take a fifth less instructions there, but spill on other GPUs."""
ALL_REGISTERS: Final = 255
"""Without a limit the assembler may spill to save registers that nobody asked for."""
TILES_AT_ONCE: Final = 4
"""Of 16 channels of V: a warp then has products of its own. With fewer, warps repeat some."""
PARTS: Final = 2
"""Of V's channels, where registers do not reach for all of them."""
LANE_BYTES: Final = 16
"""Codes that every lane loads at a time. Pages of 32 tokens have too few of them for more than two warps."""

OWN_ROWS: Final = 32
"""Rows of the own page at a time: FP16 rows need more shared memory than codes."""


@triton.jit
def locate(starts, counts, batch, BATCH: tl.constexpr, TOKENS: tl.constexpr):
    """Sequence and first token of this program's tile, the longest contexts of a sequence first; -1 past the end."""
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


@triton.jit
def sealed_scores(query, record, SHAPE: tl.constexpr):
    """Eq. (4) for Q·K^T of one sealed page: FP32 [M, Π]."""
    TILE: tl.constexpr = SHAPE.k
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = query[0][0].shape[0]
    PI: tl.constexpr = SHAPE.page_tokens
    token = tl.arange(0, PI)
    scores = tl.zeros((ROWS, PI), tl.float32)
    for p in tl.static_range(GROUPS):
        q, q_scale, q_min, q_sum = query[p]
        first_tile = p * SHAPE.partition_tiles // TILE.column_fields
        first_field = p % TILE.column_fields * TILE.row_fields
        codes = load_codes(
            record, TILE, first_field, TILE.row_fields, 0, TILE.down_pad, first_tile, SHAPE.partition_tiles
        )
        field = field_of(token, first_field, TILE)
        unit = p * (SHAPE.page_tokens // 16)
        k_scale, k_min = load_meta(record + SHAPE.k_meta, token, unit, token >= 0)
        scale, minimum = linear(k_scale, k_min, field, TILE)
        dots = tl.dot(q, tl.trans(codes)).to(tl.float32)
        scores += q_scale[:, None] * (scale[None, :] * dots + minimum[None, :] * q_sum[:, None])
        if SHAPE.asymmetric:
            if SHAPE.sums:
                at = sums_pointer(record + SHAPE.k_sums, SHAPE.k_wide_sums) + unit_place(token, unit)
                sums = tl.load(at).to(tl.float32)
            else:
                sums = sums_of(codes, field, TILE).to(tl.float32)
            scores += q_min[:, None] * (k_scale * sums + SHAPE.partition * k_min)[None, :]
    return scores


@triton.jit
def weight_codes(weights, ASYMMETRIC: tl.constexpr):
    """Weights [M, Π] in 0..1 to INT8 [M, Π], and FP32 [M]: step, minimum and sum of the codes in 0..127 or 0..255.

    Codes of 0..255 are handed out less 128; `weigh` makes up for it in integers, as in FP32 it would cancel too much.
    """
    ROWS: tl.constexpr = weights.shape[0]
    if ASYMMETRIC:
        low = tl.min(weights, axis=1)
        step = divided(1.0 - low, 255.0)
        step = tl.where(step == 0.0, 1.0, step)
        p = tl.floor((weights - low[:, None]) / step[:, None] + 0.5)
        codes = (p - 128.0).to(tl.int8)
    else:
        low = tl.zeros((ROWS,), tl.float32)
        step = tl.full((ROWS,), 1.0 / 127.0, tl.float32)
        p = tl.floor(weights * 127.0 + 0.5)
        codes = p.to(tl.int8)
    return codes, step, low, tl.sum(p, axis=1)


@triton.jit
def channels_of(block, FIELDS: tl.constexpr, DOWN: tl.constexpr, TILE):
    """Channels of V in a block of FIELDS bit fields of DOWN rows of stored tiles, in the order of `load_codes`.

    Blocks of the same stored tiles follow one another. Channels past head_dim are empty.
    """
    BLOCKS: tl.constexpr = TILE.row_fields // FIELDS
    local = tl.arange(0, DOWN * FIELDS * 16)
    down = block // BLOCKS * DOWN + local // (16 * FIELDS)
    return (down * TILE.row_fields + block % BLOCKS * FIELDS + local // 16 % FIELDS) * 16 + local % 16


@triton.jit
def weigh(p, step, low, p_sum, record, block, FIELDS: tl.constexpr, DOWN: tl.constexpr, SHAPE: tl.constexpr):
    """Eq. (4) for P·V of one sealed page and the channels of a block: FP32 [M, channels]."""
    TILE: tl.constexpr = SHAPE.v
    BLOCKS: tl.constexpr = TILE.row_fields // FIELDS
    channel = channels_of(block, FIELDS, DOWN, TILE)
    field = field_of(channel, 0, TILE)
    inside = channel < SHAPE.head_dim
    first_field, first_down = block % BLOCKS * FIELDS, block // BLOCKS * DOWN
    codes = load_codes(record + SHAPE.v_codes, TILE, first_field, FIELDS, first_down, DOWN, 0, TILE.across)
    v_scale, v_min = load_meta(record + SHAPE.v_meta, channel, 0, inside)
    scale, minimum = linear(v_scale, v_min, field, TILE)
    dots = tl.dot(p, tl.trans(codes))
    if SHAPE.asymmetric:
        if SHAPE.sums:
            at = sums_pointer(record + SHAPE.v_sums, SHAPE.v_wide_sums) + unit_place(channel, 0)
            sums = tl.load(at, mask=inside, other=0).to(tl.int32)
        else:
            sums = sums_of(codes, field, TILE)
        dots += (128 * bytes_sum(sums, field, SHAPE.page_tokens, TILE))[None, :]
    outputs = step[:, None] * (scale[None, :] * dots.to(tl.float32)) + (step * p_sum)[:, None] * minimum[None, :]
    if SHAPE.asymmetric:
        outputs += low[:, None] * (v_scale * sums.to(tl.float32) + SHAPE.page_tokens * v_min)[None, :]
    return outputs


@triton.jit
def own_rows(open_rows, batch_rows, token, column, start, end, row_stride, WIDTH: tl.constexpr):
    """FP16 rows [R, C] at positions `token`: those before the batch lie in the open page, the others in the batch.

    Both pointers are moved so that position t is t rows away, of WIDTH elements and of `row_stride`.
    """
    inside = column[None, :] < WIDTH
    early, late = token < start, (token >= start) & (token < end)
    old = tl.load(
        open_rows + token[:, None].to(tl.int64) * WIDTH + column[None, :], mask=early[:, None] & inside, other=0.0
    )
    new = tl.load(
        batch_rows + token[:, None].to(tl.int64) * row_stride + column[None, :], mask=late[:, None] & inside, other=0.0
    )
    return tl.where(early[:, None], old, new)


@triton.jit
def exact_scores(
    q_rows, seen_rows, open_k, batch_k, token, start, end, row_stride, EXACT_QK: tl.constexpr, SHAPE: tl.constexpr
):
    """Q·K^T / sqrt(D) against FP16 rows of the own page: FP32 [M, R]."""
    STEPS: tl.constexpr = (SHAPE.head_dim + 63) // 64
    ROWS: tl.constexpr = q_rows.shape[0]
    COLUMNS: tl.constexpr = token.shape[0]
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(STEPS):
        column = step * 64 + tl.arange(0, 64)
        seen = seen_rows[:, None] & (column < SHAPE.head_dim)[None, :]
        q = tl.load(q_rows[:, None] + column[None, :], mask=seen, other=0.0).to(tl.float32)
        k = own_rows(open_k, batch_k, token, column, start, end, row_stride, SHAPE.head_dim).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=EXACT_QK)
    return divided(scores, SHAPE.root)


@triton.jit
def code_scores(query, open_k, batch_k, token, start, end, row_stride, head, layer, seed, SHAPE: tl.constexpr):
    """Eq. (4) against rows of the own page that are quantized here: FP32 [M, R]."""
    GROUPS: tl.constexpr = SHAPE.groups
    z = tl.arange(0, SHAPE.partition_pad)
    seen = (token >= 0)[:, None] & (z < SHAPE.partition)[None, :]
    ROWS: tl.constexpr = query[0][0].shape[0]
    COLUMNS: tl.constexpr = token.shape[0]
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for p in tl.static_range(GROUPS):
        q, q_scale, q_min, q_sum = query[p]
        channel = p * SHAPE.partition + z
        x = own_rows(open_k, batch_k, token, channel, start, end, row_stride, SHAPE.head_dim).to(tl.float32)
        low, high = extremes(x, seen)
        scale = scale_of(low, high, SHAPE.k.levels).to(tl.float32)
        blocks = p * SHAPE.partition // 8 + tl.arange(0, SHAPE.partition_pad // 8)
        noise = noise_of(seed, layer, head, token, blocks, 0, SHAPE.stochastic)
        codes = tl.where(seen, codes_of(x, low, scale, noise, SHAPE.k.levels), 0)
        dots = tl.dot(q, tl.trans(codes.to(tl.int8))).to(tl.float32)
        scores += q_scale[:, None] * (scale[None, :] * dots + low[None, :] * q_sum[:, None])
        if SHAPE.asymmetric:
            sums = tl.sum(codes, axis=1).to(tl.float32)
            scores += q_min[:, None] * (scale * sums + SHAPE.partition * low)[None, :]
    return scores


@triton.jit(do_not_specialize=["layer", "seed"])
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
    seed,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    BATCH: tl.constexpr,
    EXACT_QK: tl.constexpr,
    V_FIELDS: tl.constexpr,
    V_DOWN: tl.constexpr,
    BLOCKS: tl.constexpr,
    OWN: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Grid (tiles, KV heads, parts of V). Rows of a tile are (token, query head), heads padded to GROUP_PAD.

    Rows of the own page are taken OWN at a time. A program multiplies BLOCKS blocks of V, each V_FIELDS bit fields of
    V_DOWN rows of stored tiles; where these are not all, others do the rest.
    """
    PI: tl.constexpr = SHAPE.page_tokens
    GROUPS: tl.constexpr = SHAPE.groups
    ROWS: tl.constexpr = TOKENS * GROUP_PAD
    sequence, first = locate(starts, counts, batch, BATCH, TOKENS)
    if sequence < 0:
        return
    head = tl.program_id(1)
    V: tl.constexpr = SHAPE.v
    first_block = tl.program_id(2) * BLOCKS if V.row_pad > BLOCKS * V_FIELDS * V_DOWN * 16 else 0
    start = tl.load(starts + sequence).to(tl.int32)
    end = start + tl.load(counts + sequence).to(tl.int32)
    shift = tl.load(offsets + sequence) - start  # from positions to rows of the batch
    own_page = first // PI

    row = tl.arange(0, ROWS)
    position, member = first + row // GROUP_PAD, row % GROUP_PAD
    seen_rows = (position >= start) & (position < end) & (member < GROUP)
    at = (shift + position) * q_stride + (head * GROUP + member) * SHAPE.head_dim
    query = ()
    z = tl.arange(0, SHAPE.partition_pad)
    for p in tl.static_range(GROUPS):
        inside = (row >= 0)[:, None] & (z < SHAPE.partition)[None, :]
        x = tl.load(q + at[:, None] + (p * SHAPE.partition + z)[None, :], mask=seen_rows[:, None] & inside, other=0.0)
        query = query + (query_codes(divided(x.to(tl.float32), SHAPE.root), inside, SHAPE.asymmetric),)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    outputs = ()  # by block of V
    for _ in tl.static_range(BLOCKS):
        outputs = outputs + (tl.zeros((ROWS, V_DOWN * V_FIELDS * 16), tl.float32),)
    for page in range(own_page):
        page_id = tl.load(table + sequence.to(tl.int64) * table_stride + page)
        record = records + page_id * page_stride + head * SHAPE.record
        scores = sealed_scores(query, record, SHAPE)
        page_top = tl.max(scores, axis=1)
        higher = tl.maximum(top, page_top)
        kept, added = tl.exp(top - higher), tl.exp(page_top - higher)
        weights, step, low, p_sum = weight_codes(tl.exp(scores - page_top[:, None]), SHAPE.asymmetric)
        step, low = step * added, low * added
        updated = ()
        for block in tl.static_range(BLOCKS):
            more = weigh(weights, step, low, p_sum, record, first_block + block, V_FIELDS, V_DOWN, SHAPE)
            updated = updated + (outputs[block] * kept[:, None] + more,)
        outputs = updated
        total = total * kept + step * p_sum + SHAPE.page_tokens * low
        top = higher

    open_at = tl.load(slots + sequence) * slot_stride + head * open_head_stride
    open_at -= (start // PI * PI).to(tl.int64) * SHAPE.head_dim
    batch_at = shift * row_stride + head * SHAPE.head_dim
    last = tl.minimum(first + TOKENS, end)
    for begin in tl.range(own_page * PI, last, OWN, num_stages=1):
        token = begin + tl.arange(0, OWN)
        if SHAPE.own_codes:
            scores = code_scores(
                query, open_k + open_at, k + batch_at, token, start, end, row_stride, head, layer, seed, SHAPE
            )
        else:
            scores = exact_scores(
                q + at, seen_rows, open_k + open_at, k + batch_at, token, start, end, row_stride, EXACT_QK, SHAPE
            )
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        high = weights.to(tl.float16)
        rest = ((weights - high.to(tl.float32)) * 2048.0).to(tl.float16)
        updated = ()
        for block in tl.static_range(BLOCKS):
            channel = channels_of(first_block + block, V_FIELDS, V_DOWN, V)
            values = own_rows(open_v + open_at, v + batch_at, token, channel, start, end, row_stride, SHAPE.head_dim)
            more = tl.dot(high, values) + tl.dot(rest, values) * (1.0 / 2048.0)
            updated = updated + (outputs[block] * kept[:, None] + more,)
        outputs = updated
        total = total * kept + tl.sum(weights, axis=1)
        top = higher

    for block in tl.static_range(BLOCKS):
        channel = channels_of(first_block + block, V_FIELDS, V_DOWN, V)
        seen = seen_rows[:, None] & (channel < SHAPE.head_dim)[None, :]
        tl.store(
            out + at[:, None] + channel[None, :], (outputs[block] / total[:, None]).to(out.dtype.element_ty), mask=seen
        )


def attn_prefill(
    fmt: HackFormat,
    layer: int,
    pages: HackPages,
    open_k: Tensor,
    open_v: Tensor,
    spans: Spans,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Launch over a batch; see `HackKernels.attn_prefill`. Checks are the caller's; nothing is read on the host."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    prefill_launch(fmt, layer, pages, open_k, open_v, spans, q, k, v, out).run()
    return out


def prefill_launch(
    fmt: HackFormat,
    layer: int,
    pages: HackPages,
    open_k: Tensor,
    open_v: Tensor,
    spans: Spans,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
) -> Launch:
    """The launch that writes `out`; q, k, v and out are contiguous."""
    records, batch = pages["k_codes"], spans.starts.numel()
    group = q.shape[1] // k.shape[1]
    tiling = tiling_of(fmt, q.dtype)
    tokens = min(fmt.page_tokens, max(1, tiling.rows // padded(group)))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "open_k": open_k,
        "open_v": open_v,
        "records": records,
        "starts": spans.starts,
        "counts": spans.counts,
        "offsets": spans.offsets,
        "table": spans.table,
        "slots": spans.slots,
        "batch": batch,
        "q_stride": q.stride(0),
        "row_stride": k.stride(0),
        "slot_stride": open_k.stride(0),
        "open_head_stride": open_k.stride(1),
        "page_stride": records.stride(0),
        "table_stride": spans.table.stride(0),
        "layer": layer,
        "seed": fmt.seed,
        "GROUP": group,
        "GROUP_PAD": padded(group),
        "TOKENS": tokens,
        "BATCH": padded(batch),
        "EXACT_QK": "tf32x3" if q.dtype is torch.float32 else "tf32",  # TF32 holds FP16 and BF16 exactly
        "V_FIELDS": tiling.v_fields,
        "V_DOWN": tiling.v_down,
        "BLOCKS": tiling.blocks,
        "OWN": tiling.own_rows,
        "SHAPE": shape_of(fmt),
    }
    # A span touches at most two tiles that it does not fill.
    tiles = min(q.shape[0], q.shape[0] // tokens + 2 * batch)
    return Launch(prefill_kernel, (tiles, k.shape[1], tiling.parts), arguments, tiling.warps, registers=ALL_REGISTERS)


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program computes."""

    rows: int
    """Query rows, heads padded."""
    warps: int
    v_fields: int
    v_down: int
    """Bit fields, and rows of stored tiles, of V that are multiplied at once: a block."""
    blocks: int
    """Blocks of V of one program."""
    parts: int
    """Programs that share V's channels, and each multiply all of K."""
    own_rows: int
    """Rows of the own page at a time."""


def tiling_of(fmt: HackFormat, dtype: torch.dtype) -> Tiling:
    """The tiling that spills on no GPU."""
    v = shape_of(fmt).v
    half = fmt.head_dim > 128 or fmt.page_tokens == 32 or dtype is torch.float32
    # Eight partitions of K, with constants for every row, leave two warps no registers for outputs of all channels.
    divided_v = fmt.page_tokens == 32 and fmt.head_dim > 128
    warps = 4 if fmt.page_tokens > 32 else 2
    down = min(v.down_pad, TILES_AT_ONCE)
    for_lanes = warps * 32 * LANE_BYTES // (down * v.across * TILE_BYTES)
    fields = min(v.row_fields, max(1, for_lanes, TILES_AT_ONCE // down))
    blocks = v.row_pad // (fields * down * 16)
    parts = PARTS if divided_v else 1
    return Tiling(
        rows=TILE_ROWS // 2 if half else TILE_ROWS,
        warps=warps,
        v_fields=fields,
        v_down=down,
        blocks=blocks // parts,
        parts=parts,
        own_rows=OWN_ROWS // 2 if divided_v else OWN_ROWS,
    )
