"""Records to planes in wire order and back, bit for bit, each in one pass; sums that did not travel are counted.

A program moves one page of one KV head. Every code is fetched from where the other order keeps it: pages pass here once
in their life, at the speed of a network, so these kernels are written to be read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import SUM_PLANES, HackFormat, HackPages
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.shape import shape_of
from hack_kernels.triton.tiles import sums_pointer, unit_place

BLOCK = tl.constexpr(2048)
"""Bytes of codes at a time: with twice as many, the assembler spills."""


@triton.jit
def code_place(row, column, TILE):
    """Byte offset and bit field of a code among stored tiles."""
    row_tile, column_tile = row // 16, column // 32
    stored = row_tile // TILE.row_fields * TILE.across + column_tile // TILE.column_fields
    field = column_tile % TILE.column_fields * TILE.row_fields + row_tile % TILE.row_fields
    lane = row % 8 * 4 + column % 16 // 4
    return stored * 512 + lane * 16 + column % 32 // 16 * 8 + row % 16 // 8 * 4 + column % 4, field


@triton.jit
def code_at(place, field, TILE):
    """Row and column of a code: inverse of `code_place`."""
    stored, lane, byte = place // 512, place % 512 // 16, place % 16
    row_tile = stored // TILE.across * TILE.row_fields + field % TILE.row_fields
    column_tile = stored % TILE.across * TILE.column_fields + field // TILE.row_fields
    row = row_tile * 16 + byte // 4 % 2 * 8 + lane // 4
    return row, column_tile * 32 + byte // 8 * 16 + lane % 4 * 4 + byte % 4


@triton.jit
def wire_code(wire, token, channel, seen, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    """Codes INT32 of a plane in wire order, where a byte holds consecutive tokens of a channel; 0 where not `seen`."""
    TILE: tl.constexpr = SHAPE.k if OF_K else SHAPE.v
    by_token = token // TILE.fields
    at = by_token * SHAPE.head_dim + channel if OF_K else channel * (SHAPE.page_tokens // TILE.fields) + by_token
    byte = tl.load(wire + at, mask=seen, other=0).to(tl.int32)
    return (byte >> (token % TILE.fields * TILE.bits)) & TILE.levels


@triton.jit
def _install_codes(wire, record, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    TILE: tl.constexpr = SHAPE.k if OF_K else SHAPE.v
    FIELDS: tl.constexpr = TILE.fields
    for begin in range(0, TILE.down * TILE.across * 512, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        packed = tl.zeros((BLOCK,), tl.int32)
        for field in tl.static_range(FIELDS):
            row, column = code_at(place, field, TILE)
            token, channel = (row, column) if OF_K else (column, row)
            seen = (token < SHAPE.page_tokens) & (channel < SHAPE.head_dim)
            packed |= wire_code(wire, token, channel, seen, SHAPE, OF_K) << (TILE.bits * field)
        tl.store(record + place, packed.to(tl.uint8) ^ 0x80, mask=place < TILE.down * TILE.across * 512)


@triton.jit
def _export_codes(record, wire, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    TILE: tl.constexpr = SHAPE.k if OF_K else SHAPE.v
    FIELDS: tl.constexpr = TILE.fields
    TOTAL: tl.constexpr = SHAPE.page_tokens * SHAPE.head_dim // FIELDS
    for begin in range(0, TOTAL, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        packed = tl.zeros((BLOCK,), tl.int32)
        for i in tl.static_range(FIELDS):
            if OF_K:
                row, column = at // SHAPE.head_dim * FIELDS + i, at % SHAPE.head_dim
            else:
                row, column = at // (SHAPE.page_tokens // FIELDS), at % (SHAPE.page_tokens // FIELDS) * FIELDS + i
            place, field = code_place(row, column, TILE)
            byte = tl.load(record + place, mask=at < TOTAL, other=0).to(tl.int32) ^ 0x80
            packed |= ((byte >> (TILE.bits * field)) & TILE.levels) << (TILE.bits * i)
        tl.store(wire + at, packed.to(tl.uint8), mask=at < TOTAL)


@triton.jit
def _move_meta(wire_min, wire_scale, meta, INSTALL: tl.constexpr, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    """K's wire planes are [Π, G], V's [D]; at rest partitions and channels come in units of 16 rows."""
    halves = meta.to(tl.pointer_type(tl.float16), bitcast=True)
    TOTAL: tl.constexpr = SHAPE.page_tokens * SHAPE.groups if OF_K else SHAPE.head_dim
    for begin in range(0, TOTAL, 256):
        at = begin + tl.arange(0, 256)
        rest = halves + 2 * _meta_place(at, SHAPE, OF_K)
        if INSTALL:
            tl.store(rest, tl.load(wire_scale + at, mask=at < TOTAL), mask=at < TOTAL)
            tl.store(rest + 1, tl.load(wire_min + at, mask=at < TOTAL), mask=at < TOTAL)
        else:
            tl.store(wire_scale + at, tl.load(rest, mask=at < TOTAL), mask=at < TOTAL)
            tl.store(wire_min + at, tl.load(rest + 1, mask=at < TOTAL), mask=at < TOTAL)


@triton.jit
def _meta_place(at, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    if OF_K:
        token, partition = at // SHAPE.groups, at % SHAPE.groups
        place = unit_place(token, partition * (SHAPE.page_tokens // 16))
    else:
        place = unit_place(at, 0)
    return place


@triton.jit
def _install_sums(wire_sums, codes, sums, COUNT: tl.constexpr, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    """Copy sums that came, or count them from the codes in wire order."""
    TOTAL: tl.constexpr = SHAPE.page_tokens * SHAPE.groups if OF_K else SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.partition_pad if OF_K else SHAPE.page_tokens
    for begin in range(0, TOTAL, 32):
        at = begin + tl.arange(0, 32)
        if COUNT:
            i = tl.arange(0, WIDTH)[None, :]
            if OF_K:
                seen = (at < TOTAL)[:, None] & (i < SHAPE.partition)
                token, channel = (at // SHAPE.groups)[:, None], (at % SHAPE.groups * SHAPE.partition)[:, None] + i
            else:
                seen = (at < TOTAL)[:, None] & (i >= 0)
                token, channel = i, at[:, None]
            total = tl.sum(wire_code(codes, token, channel, seen, SHAPE, OF_K), axis=1)
        else:
            total = tl.load(wire_sums + at, mask=at < TOTAL)
        place = sums + _meta_place(at, SHAPE, OF_K)
        tl.store(place, total.to(place.dtype.element_ty), mask=at < TOTAL)


@triton.jit
def _export_sums(sums, wire_sums, SHAPE: tl.constexpr, OF_K: tl.constexpr):
    TOTAL: tl.constexpr = SHAPE.page_tokens * SHAPE.groups if OF_K else SHAPE.head_dim
    for begin in range(0, TOTAL, 256):
        at = begin + tl.arange(0, 256)
        total = tl.load(sums + _meta_place(at, SHAPE, OF_K), mask=at < TOTAL)
        tl.store(wire_sums + at, total, mask=at < TOTAL)


@triton.jit
def exchange_kernel(
    k_codes,
    k_min,
    k_scale,
    v_codes,
    v_min,
    v_scale,
    k_sums,
    v_sums,
    page_ids,
    records,
    page_stride,
    INSTALL: tl.constexpr,
    COUNT: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Grid (pages, KV heads), the wire's planes being [heads, pages, ...]. COUNT: install sums that did not travel."""
    record = records + tl.load(page_ids + tl.program_id(0)) * page_stride + tl.program_id(1) * SHAPE.record
    index = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    k_rows, page = SHAPE.page_tokens * SHAPE.groups, SHAPE.page_tokens * SHAPE.head_dim
    k_codes += index * (page // SHAPE.k.fields)
    v_codes += index * (page // SHAPE.v.fields)
    k_min, k_scale, k_sums = k_min + index * k_rows, k_scale + index * k_rows, k_sums + index * k_rows
    v_min, v_scale = v_min + index * SHAPE.head_dim, v_scale + index * SHAPE.head_dim
    v_sums += index * SHAPE.head_dim
    _move_meta(k_min, k_scale, record + SHAPE.k_meta, INSTALL, SHAPE, True)
    _move_meta(v_min, v_scale, record + SHAPE.v_meta, INSTALL, SHAPE, False)
    k_resting = sums_pointer(record + SHAPE.k_sums, SHAPE.k_wide_sums)
    v_resting = sums_pointer(record + SHAPE.v_sums, SHAPE.v_wide_sums)
    if INSTALL:
        _install_codes(k_codes, record, SHAPE, True)
        _install_codes(v_codes, record + SHAPE.v_codes, SHAPE, False)
        if SHAPE.sums:
            _install_sums(k_sums, k_codes, k_resting, COUNT, SHAPE, True)
            _install_sums(v_sums, v_codes, v_resting, COUNT, SHAPE, False)
    else:
        _export_codes(record, k_codes, SHAPE, True)
        _export_codes(record + SHAPE.v_codes, v_codes, SHAPE, False)
        if SHAPE.sums:
            _export_sums(k_resting, k_sums, SHAPE, True)
            _export_sums(v_resting, v_sums, SHAPE, False)


def install(fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
    """Planes [Hkv, P, *plane shape] in wire order into the records of `page_ids`; checks are the caller's."""
    wire = {name: plane.contiguous() for name, plane in planes.items()}
    exchange_launch(fmt, pages, page_ids, wire, installing=True).run()


def export(fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> HackPages:
    """The records of `page_ids` as planes [Hkv, P, *plane shape] in wire order."""
    records = pages["k_codes"]
    lead = (records.shape[1], page_ids.numel())
    wire = {
        name: torch.empty((*lead, *shape), dtype=dtype, device=records.device)
        for name, (shape, dtype) in fmt.plane_specs().items()
    }
    if page_ids.numel():
        exchange_launch(fmt, pages, page_ids, wire, installing=False).run()
    return wire


def exchange_launch(
    fmt: HackFormat, pages: HackPages, page_ids: Tensor, wire: HackPages, *, installing: bool
) -> Launch:
    """The launch of either; `wire` is contiguous. Where sums are absent, the codes stand in for them untouched."""
    records = pages["k_codes"]
    came = all(name in wire for name in SUM_PLANES)
    arguments = {
        **{name: wire[name] for name in ("k_codes", "k_min", "k_scale", "v_codes", "v_min", "v_scale")},
        "k_sums": wire["k_sums"] if came else wire["k_codes"],
        "v_sums": wire["v_sums"] if came else wire["v_codes"],
        "page_ids": page_ids,
        "records": records,
        "page_stride": records.stride(0),
        "INSTALL": installing,
        "COUNT": installing and fmt.sums and not came,
        "SHAPE": shape_of(fmt),
    }
    return Launch(exchange_kernel, (page_ids.numel(), records.shape[1]), arguments, warps=8)
