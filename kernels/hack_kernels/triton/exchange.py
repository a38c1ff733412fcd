"""Records to planes in wire order and back, bit for bit, each in one pass; sums that did not travel are counted.

Both orders are 32-bit words of codes, and both have the same six axes, the wire in the order (tile down, row half, row,
tile across, column half, quad), a record in the order (tile down, tile across, row, quad, column half, row half). What
differs besides is which codes share a byte. A byte at rest holds one code of each of F code tiles, its *fields*; on the
wire it holds F consecutive tokens. So of F words on one side, taken F apart, all codes are found in F words on the
other, and this *turn* of a square of codes is all the arithmetic:

    K: word b of the wire has tokens b·F .. b·F+F-1 of 4 channels; at rest each of them is in a word of its own.
    V: word b of the wire has 4·F tokens of a channel; at rest each 4 of them are in a word of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import PageFormat, Planes
from hack_kernels.hack_format import SUM_PLANES, HackFormat
from hack_kernels.triton.code_tiles import CodeTiles, padded
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
def words_at(pages):
    """Pointers to bytes as pointers to 32-bit words, along axis 1."""
    return pages.to(tl.pointer_type(tl.uint32), bitcast=True)[:, None]


@triton.jit
def wire_place(field, TILE, OF_K: tl.constexpr):
    """Where a plane in wire order has the words of one field, [1, WORDS], and which of them exist."""
    down = tl.arange(0, TILE.exchange_words)[None, :]
    if OF_K:
        LINES: tl.constexpr = 16 // TILE.fields  # of the wire, to a row tile
        column_tile = down // 8 % TILE.across_pad * TILE.column_fields + field // TILE.row_fields
        line = down // (8 * TILE.across_pad) % LINES
        row_tile = down // (8 * TILE.across_pad * LINES) * TILE.row_fields + field % TILE.row_fields
        place = (row_tile * LINES + line) * (TILE.columns // 4) + column_tile * 8 + down % 8
        there = column_tile < TILE.columns // 32
        if TILE.columns % 32 != 0:
            there = column_tile * 8 + down % 8 < TILE.columns // 4
    elif TILE.column_fields > 1:
        row_tile = down // (16 * TILE.across_pad) * TILE.row_fields + field % TILE.row_fields
        column_tile = down % TILE.across_pad * TILE.column_fields + field // TILE.row_fields
        place = (row_tile * 16 + down // TILE.across_pad % 16) * TILE.column_tiles + column_tile
        there = (row_tile < TILE.rows // 16) & (column_tile < TILE.column_tiles)
    else:
        WORDS: tl.constexpr = 4 * TILE.columns // TILE.fields  # of a row tile
        row_tile = down // WORDS * TILE.row_fields + field
        place = row_tile * WORDS + down % WORDS
        there = row_tile < TILE.rows // 16
    return place, there


@triton.jit
def quads_of(TILE, OF_K: tl.constexpr):
    """Words of a row of one part, in a half of the columns of a tile."""
    return tl.constexpr(4 if OF_K or TILE.fields == 1 else 2 if TILE.fields == 2 else 1)


@triton.jit
def halves_of(TILE, OF_K: tl.constexpr):
    """Halves of columns that one part has: 32 codes of V of one bit are a word, and so each part is in one half."""
    return tl.constexpr(1 if TILE.fields == 8 and not OF_K else 2)


@triton.jit
def rest_place(part, TILE, OF_K: tl.constexpr):
    """Where a record has the words of one part, [1, WORDS], and which of them exist."""
    ROWS: tl.constexpr = 8 // TILE.fields if OF_K else 8
    QUADS: tl.constexpr = quads_of(TILE, OF_K)
    HALVES: tl.constexpr = 2 * halves_of(TILE, OF_K)
    at = tl.arange(0, TILE.exchange_words)[None, :]
    quad, row = at // HALVES % QUADS, at // (HALVES * QUADS) % ROWS
    if OF_K:
        row = row * TILE.fields + part
    elif HALVES == 4:
        quad = quad * TILE.fields + part
    else:
        quad = quad + part % 4
    across = at // (HALVES * QUADS * ROWS) % TILE.across_pad
    down = at // (HALVES * QUADS * ROWS * TILE.across_pad)
    place = (down * TILE.across + across) * 128 + row * 16 + quad * 4 + at % HALVES
    if HALVES == 2:
        place += part // 4 * 2
    return place, (down < TILE.down) & (across < TILE.across)


@triton.jit
def to_rest_order(words, TILE, OF_K: tl.constexpr):
    """[PAGES, WORDS] in wire order to the order of a record."""
    ROWS: tl.constexpr = 8 // TILE.fields if OF_K else 8
    QUADS: tl.constexpr = quads_of(TILE, OF_K)
    HALVES: tl.constexpr = halves_of(TILE, OF_K)
    split = tl.reshape(words, (words.shape[0] * TILE.down_pad, 2, ROWS, TILE.across_pad, HALVES, QUADS))
    return tl.reshape(tl.permute(split, (0, 3, 2, 5, 4, 1)), words.shape)


@triton.jit
def to_wire_order(words, TILE, OF_K: tl.constexpr):
    """Inverse of `to_rest_order`."""
    ROWS: tl.constexpr = 8 // TILE.fields if OF_K else 8
    QUADS: tl.constexpr = quads_of(TILE, OF_K)
    HALVES: tl.constexpr = halves_of(TILE, OF_K)
    split = tl.reshape(words, (words.shape[0] * TILE.down_pad, TILE.across_pad, ROWS, QUADS, HALVES, 2))
    return tl.reshape(tl.permute(split, (0, 5, 2, 1, 4, 3)), words.shape)


@triton.jit
def part_of_word(word, part, TILE, OF_K: tl.constexpr):
    """Four codes of a wire's word, one in the low bits of each byte."""
    if OF_K:
        return (word >> (TILE.bits * part)) & (TILE.levels * 0x01010101)
    four = word >> (4 * TILE.bits * part)
    spread = four & TILE.levels
    for i in tl.static_range(1, 4):
        spread |= (four & (TILE.levels << (TILE.bits * i))) << ((8 - TILE.bits) * i)
    return spread


@triton.jit
def word_of_part(spread, part, TILE, OF_K: tl.constexpr):
    """Inverse of `part_of_word`, all other codes 0."""
    if OF_K:
        return spread << (TILE.bits * part)
    four = spread & TILE.levels
    for i in tl.static_range(1, 4):
        four |= (spread >> ((8 - TILE.bits) * i)) & (TILE.levels << (TILE.bits * i))
    return four << (4 * TILE.bits * part)


@triton.jit
def load_wire(wire, present, TILE, OF_K: tl.constexpr):
    """Every word of a plane in wire order: a tuple over fields of [PAGES, WORDS]."""
    FIELDS: tl.constexpr = TILE.fields
    words = ()
    for field in tl.static_range(FIELDS):
        place, there = wire_place(field, TILE, OF_K)
        words = words + (tl.load(words_at(wire) + place, mask=present & there, other=0),)
    return words


@triton.jit
def install_codes(words, rest, present, TILE, OF_K: tl.constexpr):
    """Words in wire order to records."""
    FIELDS: tl.constexpr = TILE.fields
    for part in tl.static_range(FIELDS):
        packed = tl.full(words[0].shape, 0x80808080, tl.uint32)
        for field in tl.static_range(FIELDS):
            packed ^= part_of_word(words[field], part, TILE, OF_K) << (TILE.bits * field)
        place, there = rest_place(part, TILE, OF_K)
        tl.store(words_at(rest) + place, to_rest_order(packed, TILE, OF_K), mask=present & there)


@triton.jit
def export_codes(rest, wire, present, TILE, OF_K: tl.constexpr):
    """Records to a plane in wire order."""
    FIELDS: tl.constexpr = TILE.fields
    words = ()
    for part in tl.static_range(FIELDS):
        place, there = rest_place(part, TILE, OF_K)
        words = words + (tl.load(words_at(rest) + place, mask=present & there, other=0) ^ 0x80808080,)
    for field in tl.static_range(FIELDS):
        packed = tl.zeros(words[0].shape, tl.uint32)
        for part in tl.static_range(FIELDS):
            spread = (words[part] >> (TILE.bits * field)) & (TILE.levels * 0x01010101)
            packed |= word_of_part(spread, part, TILE, OF_K)
        place, there = wire_place(field, TILE, OF_K)
        tl.store(words_at(wire) + place, to_wire_order(packed, TILE, OF_K), mask=present & there)


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
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    present = (page < count)[:, None]
    ids = tl.load(page_ids + page, mask=page < count, other=0)
    record = records + ids * page_stride + tl.program_id(1) * LAYOUT.nbytes
    index = tl.program_id(1).to(tl.int64) * count + page
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
    """As many pages as a program needs for every lane to load 16 bytes, and its warps."""
    words = min(tile.exchange_words for tile in tiles)
    least = words // (32 * LANE_WORDS)
    return 1 if least else padded(32 * LANE_WORDS // words), min(max(least, 1), MOST_WARPS)


def exchange_launch(fmt: HackFormat, pages: Planes, page_ids: Tensor, wire: Planes, *, installing: bool) -> Launch:
    """The launch of `install` or `export`; `wire` is contiguous. Absent sums are passed as the codes, never accessed."""
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
