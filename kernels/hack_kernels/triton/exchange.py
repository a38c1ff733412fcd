"""Records to planes in wire order and back, bit for bit, each in one pass; sums that did not travel are counted.

`exchange_codes.py` has the two orders of codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import PageFormat, Planes
from hack_kernels.hack_format import SUM_PLANES, HackFormat
from hack_kernels.triton.code_tiles import CodeTiles, padded
from hack_kernels.triton.exchange_codes import export_codes, install_codes, load_wire, part_of_word
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import page_layout
from hack_kernels.triton.tiles import sums_pointer, unit_place

LANE_WORDS = 4
"""Words of a 16-byte load."""
MOST_WARPS = 4
COUNTING_REGISTERS = 128
"""Register limit of a thread that counts sums: without a limit the assembler spills on sm_80, although registers are
free."""


@triton.jit
def bytes_sum_of_word(word):
    """Sum of a word's four bytes, which must stay below 256."""
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def count_k_sums(words, rest, present, LAYOUT: tl.constexpr):
    """Sums over channels of a partition for every token, from words in wire order to records."""
    TILE: tl.constexpr = LAYOUT.k_tiles
    FIELDS: tl.constexpr = TILE.fields
    LINES: tl.constexpr = TILE.down_pad * 16 // FIELDS
    PARTITIONS: tl.constexpr = TILE.across_pad // triton.next_power_of_2(LAYOUT.partition_tiles)
    PAGES: tl.constexpr = words[0].shape[0]
    line = tl.arange(0, LINES)[None, :, None]
    across = tl.arange(0, PARTITIONS)[None, None, :]
    for field in tl.static_range(FIELDS):
        row_tile = line // (16 // FIELDS) * TILE.row_fields + field % TILE.row_fields
        partition = across * TILE.column_fields + field // TILE.row_fields
        for part in tl.static_range(FIELDS):
            four = bytes_sum_of_word(part_of_word(words[field], part, TILE, True))
            sums = tl.sum(tl.reshape(four, (PAGES, LINES, PARTITIONS, TILE.across_pad // PARTITIONS * 8)), axis=3)
            token = (row_tile * (16 // FIELDS) + line % (16 // FIELDS)) * FIELDS + part
            place = rest[:, None, None] + unit_place(token, partition * (LAYOUT.page_tokens // 16))
            seen = present[:, :, None] & (partition < LAYOUT.groups) & (token >= 0)
            tl.store(place, sums.to(place.dtype.element_ty), mask=seen)


@triton.jit
def count_v_sums(words, rest, present, LAYOUT: tl.constexpr):
    """Sums over tokens for every channel, from words in wire order to records."""
    TILE: tl.constexpr = LAYOUT.v_tiles
    FIELDS: tl.constexpr = TILE.fields
    PAGES: tl.constexpr = words[0].shape[0]
    ROWS: tl.constexpr = TILE.field_rows
    row = tl.arange(0, ROWS)[None, :]
    for field in tl.static_range(FIELDS):
        total = tl.zeros((PAGES, ROWS), tl.int32)
        for part in tl.static_range(FIELDS):
            four = bytes_sum_of_word(part_of_word(words[field], part, TILE, False))
            total += tl.sum(tl.reshape(four, (PAGES, TILE.field_rows, TILE.columns // (4 * FIELDS))), axis=2)
        channel = (row // 16 * FIELDS + field) * 16 + row % 16
        place = rest[:, None] + unit_place(channel, 0)
        tl.store(place, total.to(place.dtype.element_ty), mask=present & (channel < LAYOUT.head_dim))


@triton.jit
def row_places(LAYOUT: tl.constexpr, OF_K: tl.constexpr):
    """Rows in wire order, K's [Π, G] or V's [D], and their places among units of 16 rows; both [1, rows]."""
    TOTAL: tl.constexpr = LAYOUT.page_tokens * LAYOUT.groups if OF_K else LAYOUT.head_dim
    at = tl.arange(0, triton.next_power_of_2(TOTAL))[None, :]
    if OF_K:
        token, partition = at // LAYOUT.groups, at % LAYOUT.groups
        place = unit_place(token, partition * (LAYOUT.page_tokens // 16))
    else:
        place = unit_place(at, 0)
    return at, place, at < TOTAL


@triton.jit
def move(wire, rest, present, INSTALL: tl.constexpr, STEP: tl.constexpr, LAYOUT: tl.constexpr, OF_K: tl.constexpr):
    """Scales, minima or sums of rows, STEP elements apart at rest."""
    at, place, inside = row_places(LAYOUT, OF_K)
    seen = present & inside
    if INSTALL:
        tl.store(rest[:, None] + STEP * place, tl.load(wire[:, None] + at, mask=seen), mask=seen)
    else:
        tl.store(wire[:, None] + at, tl.load(rest[:, None] + STEP * place, mask=seen), mask=seen)


@triton.jit
def block_of_pages(page_ids, records, count, page_stride, PAGES: tl.constexpr, LAYOUT: tl.constexpr):
    """PAGES pages of a program of a grid (blocks of pages, KV heads): which exist [PAGES, 1], their records, and their
    numbers in planes [heads, count, ...] in wire order."""
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    present = (page < count)[:, None]
    ids = tl.load(page_ids + page, mask=page < count, other=0)
    record = records + ids * page_stride + tl.program_id(1) * LAYOUT.nbytes
    return present, record, tl.program_id(1).to(tl.int64) * count + page


@triton.jit(do_not_specialize=["count"])
def exchange_kernel(
    k_codes,
    k_min,
    k_scale,
    k_sums,
    v_codes,
    v_min,
    v_scale,
    v_sums,
    page_ids,
    records,
    count,
    page_stride,
    INSTALL: tl.constexpr,
    COUNT: tl.constexpr,
    PAGES: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Grid (blocks of PAGES pages, KV heads); wire planes are contiguous [heads, count, ...]. COUNT: install sums that
    did not travel."""
    present, record, index = block_of_pages(page_ids, records, count, page_stride, PAGES, LAYOUT)
    K: tl.constexpr = LAYOUT.k_tiles
    V: tl.constexpr = LAYOUT.v_tiles
    k_rows: tl.constexpr = LAYOUT.page_tokens * LAYOUT.groups
    plane: tl.constexpr = LAYOUT.page_tokens * LAYOUT.head_dim
    k_wire, v_wire = k_codes + index * (plane // K.fields), v_codes + index * (plane // V.fields)
    k_meta = (record + LAYOUT.k_meta).to(tl.pointer_type(tl.float16), bitcast=True)
    v_meta = (record + LAYOUT.v_meta).to(tl.pointer_type(tl.float16), bitcast=True)
    move(k_scale + index * k_rows, k_meta, present, INSTALL, 2, LAYOUT, True)
    move(k_min + index * k_rows, k_meta + 1, present, INSTALL, 2, LAYOUT, True)
    move(v_scale + index * LAYOUT.head_dim, v_meta, present, INSTALL, 2, LAYOUT, False)
    move(v_min + index * LAYOUT.head_dim, v_meta + 1, present, INSTALL, 2, LAYOUT, False)
    k_resting = sums_pointer(record + LAYOUT.k_sums, LAYOUT.wide_k_sums)
    v_resting = sums_pointer(record + LAYOUT.v_sums, LAYOUT.wide_v_sums)
    if LAYOUT.sums and not COUNT:
        move(k_sums + index * k_rows, k_resting, present, INSTALL, 1, LAYOUT, True)
        move(v_sums + index * LAYOUT.head_dim, v_resting, present, INSTALL, 1, LAYOUT, False)
    if INSTALL:
        words = load_wire(k_wire, present, K, True)
        install_codes(words, record, present, K, True)
        if COUNT:
            count_k_sums(words, k_resting, present, LAYOUT)
        words = load_wire(v_wire, present, V, False)
        install_codes(words, record + LAYOUT.v_codes, present, V, False)
        if COUNT:
            count_v_sums(words, v_resting, present, LAYOUT)
    else:
        export_codes(record, k_wire, present, K, True)
        export_codes(record + LAYOUT.v_codes, v_wire, present, V, False)


def install(fmt: HackFormat, pages: Planes, page_ids: Tensor, planes: Planes) -> None:
    """Planes [Hkv, P, *plane shape] in wire order into the records of `page_ids`; checks are the caller's."""
    wire = {name: plane.contiguous() for name, plane in planes.items()}
    exchange_launch(fmt, pages, page_ids, wire, installing=True).run()


def export(fmt: HackFormat, pages: Planes, page_ids: Tensor) -> Planes:
    """The records of `page_ids` as planes [Hkv, P, *plane shape] in wire order."""
    wire = empty_wire(fmt, pages, page_ids)
    if page_ids.numel():
        exchange_launch(fmt, pages, page_ids, wire, installing=False).run()
    return wire


def empty_wire(fmt: PageFormat, pages: Planes, page_ids: Tensor) -> Planes:
    """Room for planes in wire order."""
    records = pages["k_codes"]
    lead = (records.shape[1], page_ids.numel())
    return {
        plane.name: torch.empty((*lead, *plane.shape), dtype=plane.dtype, device=records.device) for plane in fmt.planes
    }


def pages_together(*tiles: CodeTiles) -> tuple[int, int]:
    """The number of pages with which every lane of a program loads 16 bytes, and the program's warps."""
    words = min(tile.exchange_words for tile in tiles)
    least = words // (32 * LANE_WORDS)
    return 1 if least else padded(32 * LANE_WORDS // words), min(max(least, 1), MOST_WARPS)


def exchange_launch(fmt: HackFormat, pages: Planes, page_ids: Tensor, wire: Planes, *, installing: bool) -> Launch:
    """The launch of `install` or `export`; `wire` is contiguous. Absent sums are passed as codes, never accessed."""
    records, layout, count = pages["k_codes"], page_layout(fmt), page_ids.numel()
    came = all(name in wire for name in SUM_PLANES)
    together, warps = pages_together(layout.k_tiles, layout.v_tiles)
    arguments = {
        **{name: wire[name] for name in ("k_codes", "k_min", "k_scale", "v_codes", "v_min", "v_scale")},
        "k_sums": wire["k_sums"] if came else wire["k_codes"],
        "v_sums": wire["v_sums"] if came else wire["v_codes"],
        "page_ids": page_ids,
        "records": records,
        "count": count,
        "page_stride": records.stride(0),
        "INSTALL": installing,
        "COUNT": installing and fmt.sums and not came,
        "PAGES": together,
        "LAYOUT": layout,
    }
    grid = (-(-count // together), records.shape[1])
    registers = COUNTING_REGISTERS if arguments["COUNT"] else None
    return Launch(exchange_kernel, grid, arguments, warps, registers=registers)
