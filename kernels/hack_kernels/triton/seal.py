"""Full pages of FP16 rows to records: extremes, scale, codes, sums and resting order in one pass over K and V.

A program issues all of its loads before it stores anything. The compiler cannot know that records do not overlap rows,
so a load behind a store would wait for memory by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool
from hack_kernels.hack_format import HackFormat
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import page_layout
from hack_kernels.triton.quantize import codes_of, extremes, noise_of, scale_of
from hack_kernels.triton.tiles import meta_word, store_codes, store_meta, sums_pointer, unit_place, zipped


@triton.jit
def loaded_k(rows, token_stride, LAYOUT: tl.constexpr):
    """K of a page: a tuple over partitions of FP16 [Π, partition_pad]."""
    token = tl.arange(0, LAYOUT.page_tokens)[:, None]
    z = tl.arange(0, LAYOUT.partition_pad)[None, :]
    loaded = ()
    for partition in tl.static_range(tl.constexpr(LAYOUT.groups)):
        at = rows + token * token_stride + (partition * LAYOUT.partition + z)
        loaded = loaded + (tl.load(at, mask=(token >= 0) & (z < LAYOUT.partition), other=0.0),)
    return loaded


@triton.jit
def loaded_v(rows, token_stride, LAYOUT: tl.constexpr):
    """V of a page: a tuple over fields of FP16 [TILE.field_rows, Π], tokens in zipped order."""
    FIELDS: tl.constexpr = LAYOUT.v_tiles.row_fields
    local = tl.arange(0, LAYOUT.v_tiles.field_rows)[:, None]
    token = zipped(tl.arange(0, LAYOUT.page_tokens))[None, :]
    loaded = ()
    for field in tl.static_range(FIELDS):
        channel = (local // 16 * FIELDS + field) * 16 + local % 16
        seen = (channel < LAYOUT.head_dim) & (token >= 0)
        loaded = loaded + (tl.load(rows + token * token_stride + channel, mask=seen, other=0.0),)
    return loaded


@triton.jit
def fields_together(codes, TILE: tl.constexpr):
    """Codes INT32 [rows, C] of all fields, rows in order -> [TILE.field_rows, C], each field at its bits."""
    FIELDS: tl.constexpr = TILE.row_fields
    DOWN: tl.constexpr = TILE.down_pad
    split = tl.reshape(codes, (DOWN, FIELDS, 16, codes.shape[1]))
    shift = (TILE.bits * tl.arange(0, FIELDS))[None, :, None, None]
    return tl.reshape(tl.sum(split << shift, axis=1), (DOWN * 16, codes.shape[1]))


@triton.jit
def _seal_k(rows, record, token_stride, start, head, layer, seed, LAYOUT: tl.constexpr):
    """Seals K partition by partition. Where a byte holds two column tiles, two partitions share its stored tile."""
    TILE: tl.constexpr = LAYOUT.k_tiles
    STEPS: tl.constexpr = (LAYOUT.groups + TILE.column_fields - 1) // TILE.column_fields
    SHARING: tl.constexpr = TILE.column_fields
    FIELDS: tl.constexpr = TILE.row_fields
    ROWS: tl.constexpr = TILE.field_rows
    COLUMNS: tl.constexpr = LAYOUT.partition_pad
    token = tl.arange(0, LAYOUT.page_tokens)
    z = tl.arange(0, COLUMNS)
    seen = (token >= 0)[:, None] & (z < LAYOUT.partition)[None, :]
    eighth = tl.arange(0, LAYOUT.partition_pad // 8)
    loaded = loaded_k(rows, token_stride, LAYOUT)
    for step in tl.static_range(STEPS):
        packed = tl.zeros((ROWS, COLUMNS), tl.int32)
        for shared in tl.static_range(SHARING):
            if step * SHARING + shared < LAYOUT.groups:
                partition = step * SHARING + shared
                x = loaded[step * SHARING + shared].to(tl.float32)
                low, high = extremes(x, seen)
                scale = scale_of(low, high, TILE.levels)
                first_block = partition * LAYOUT.partition // 8
                noise = noise_of(seed, layer, head, start + token, first_block + eighth, 0, LAYOUT.stochastic)
                codes = tl.where(seen, codes_of(x, low, scale.to(tl.float32), noise, TILE.levels), 0)
                packed |= fields_together(codes, TILE) << (TILE.bits * shared * FIELDS)
                unit = partition * (LAYOUT.page_tokens // 16)
                store_meta(record + LAYOUT.k_meta, token, unit, meta_word(scale, low), token >= 0)
                if LAYOUT.sums:
                    sums = sums_pointer(record + LAYOUT.k_sums, LAYOUT.wide_k_sums) + unit_place(token, unit)
                    tl.store(sums, tl.sum(codes, axis=1).to(sums.dtype.element_ty))
        first_tile = step * SHARING * LAYOUT.partition_tiles // SHARING
        store_codes(record, packed, first_tile, TILE, LAYOUT.partition_tiles)


@triton.jit
def field_by_field(x):
    """A tuple over two or four fields of [R] -> [R · fields], the fields of a row side by side."""
    joined = tl.join(x[0], x[1]) if len(x) == 2 else tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    return tl.reshape(joined, (x[0].shape[0] * len(x),))


@triton.jit
def _seal_v(rows, record, token_stride, start, head, layer, seed, LAYOUT: tl.constexpr):
    """Seals V. Channels are rows here and tokens columns; a channel's tokens are its partition. Metadata of all fields
    are stored at once, because they change lanes on their way."""
    TILE: tl.constexpr = LAYOUT.v_tiles
    FIELDS: tl.constexpr = TILE.row_fields
    ROWS: tl.constexpr = TILE.field_rows
    COLUMNS: tl.constexpr = LAYOUT.page_tokens
    local = tl.arange(0, ROWS)
    eighth = tl.arange(0, ROWS // 8)
    token = zipped(tl.arange(0, COLUMNS))
    packed = tl.zeros((ROWS, COLUMNS), tl.int32)
    loaded = loaded_v(rows, token_stride, LAYOUT)
    words = ()
    all_sums = ()
    for field in tl.static_range(FIELDS):
        channel = (local // 16 * FIELDS + field) * 16 + local % 16
        seen = (channel < LAYOUT.head_dim)[:, None] & (token >= 0)[None, :]
        x = loaded[field].to(tl.float32)
        low, high = extremes(x, (channel >= 0)[:, None] & (token >= 0)[None, :])
        scale = scale_of(low, high, TILE.levels)
        blocks = (eighth // 2 * FIELDS + field) * 2 + eighth % 2
        noise = noise_of(seed, layer, head, start + token, blocks, 1, LAYOUT.stochastic)
        codes = codes_of(x, low, scale.to(tl.float32), tl.trans(noise), TILE.levels)
        codes = tl.where(seen, codes, 0)
        packed |= codes << (TILE.bits * field)
        words = words + (meta_word(scale, low),)
        if LAYOUT.sums:
            all_sums = all_sums + (tl.sum(codes, axis=1),)
    at = tl.arange(0, ROWS * FIELDS)
    channel = (at // FIELDS // 16 * FIELDS + at % FIELDS) * 16 + at // FIELDS % 16
    store_meta(record + LAYOUT.v_meta, channel, 0, field_by_field(words), channel < LAYOUT.head_dim)
    if LAYOUT.sums:
        sums = sums_pointer(record + LAYOUT.v_sums, LAYOUT.wide_v_sums) + unit_place(channel, 0)
        tl.store(sums, field_by_field(all_sums).to(sums.dtype.element_ty), mask=channel < LAYOUT.head_dim)
    store_codes(record + LAYOUT.v_codes, packed, 0, TILE, TILE.across)


@triton.jit(do_not_specialize=["layer", "head_start", "seed"])
def seal_kernel(
    k,
    v,
    page_ids,
    starts,
    records,
    page_stride,
    row_stride,
    head_stride,
    token_stride,
    layer,
    head_start,
    seed,
    LAYOUT: tl.constexpr,
):
    """Grid (pages, KV heads, 2): K or V of one page of one head. For noise, head 0 is the model's head `head_start`."""
    page, head = tl.program_id(0), tl.program_id(1)
    record = records + tl.load(page_ids + page) * page_stride + head * LAYOUT.nbytes
    start = tl.load(starts + page).to(tl.int32)
    at = page.to(tl.int64) * row_stride + head * head_stride
    model_head = head_start + head
    if tl.program_id(2) == 0:
        _seal_k(k + at, record, token_stride, start, model_head, layer, seed, LAYOUT)
    else:
        _seal_v(v + at, record, token_stride, start, model_head, layer, seed, LAYOUT)


def seal(fmt: HackFormat, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
    """Quantize k, v [P, Hkv, Π, D] FP16 into the records of `page_ids` of a pool; checks are the caller's."""
    seal_launch(fmt, layer, pool, page_ids, starts, k.contiguous(), v.contiguous()).run()


def seal_launch(
    fmt: HackFormat, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor
) -> Launch:
    """The launch of `seal`; k and v are contiguous. It uses no fused multiply-adds and so rounds as the reference."""
    records, layout = pool.planes["k_codes"], page_layout(fmt)
    elements = max(layout.k_tiles.field_rows * layout.partition_pad, layout.v_tiles.field_rows * layout.page_tokens)
    arguments = {
        "k": k,
        "v": v,
        "page_ids": page_ids,
        "starts": starts,
        "records": records,
        "page_stride": records.stride(0),
        "row_stride": k.stride(0),
        "head_stride": k.stride(1),
        "token_stride": k.stride(2),
        "layer": layer,
        "head_start": pool.head_start,
        "seed": fmt.seed,
        "LAYOUT": layout,
    }
    grid = (page_ids.numel(), k.shape[1], 2)
    return Launch(seal_kernel, grid, arguments, warps=4 if elements <= 4096 else 8, fusion=False)
