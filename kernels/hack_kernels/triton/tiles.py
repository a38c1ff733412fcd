"""Reading and writing the parts of a record (`layout.py`) in kernels: code tiles, metadata, sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_codes(
    codes, TILE, first_field, FIELDS: tl.constexpr, first_down, DOWN: tl.constexpr, first_across, ACROSS: tl.constexpr
):
    """Masked code bytes INT8 [DOWN · FIELDS · 16, 32 · ACROSS pad], worth code · 2^(bits · field).

    They are those of FIELDS fields of DOWN x ACROSS stored tiles. Every field reads the same bytes, 16 a load, and
    keeps its own bits: rows are then in order, and all reads but the first are of the nearest cache. Rows and columns
    past the matrix are code 0.
    """
    PAD: tl.constexpr = ACROSS if ACROSS <= 2 else 4
    field = tl.arange(0, FIELDS)[:, None, None, None]
    down = tl.arange(0, DOWN)[None, :, None, None]
    across = tl.arange(0, PAD)[None, None, :, None]
    byte = tl.arange(0, 512)[None, None, None, :]
    at = codes + ((first_down + down) * TILE.across + first_across + across) * 512 + byte + 0 * field
    seen = (first_down + down < TILE.down) & (across < ACROSS) & (field >= 0) & (byte >= 0)
    raw = tl.load(at, mask=seen, other=0x80)
    kept = raw & (TILE.levels << (TILE.bits * (first_field + field))).to(tl.uint8)
    split = tl.reshape(kept.to(tl.int8, bitcast=True), (FIELDS, DOWN, PAD, 8, 4, 2, 2, 4))
    return tl.reshape(tl.permute(split, (1, 0, 6, 3, 2, 5, 4, 7)), (DOWN * FIELDS * 16, PAD * 32))


@triton.jit
def field_of(row, first_field, TILE):
    """Bit field of a row's codes."""
    return first_field + (row // 16) % TILE.row_fields


@triton.jit
def linear(scale, minimum, field, TILE):
    """Scale and minimum FP32 to apply to masked code bytes: the weight of the field and the flipped bit are undone."""
    weight = (1 << (TILE.bits * field)).to(tl.float32)
    flipped = tl.where(field == TILE.fields - 1, 128.0 / (1 << (TILE.bits * (TILE.fields - 1))), 0.0)
    return scale / weight, minimum + flipped * scale


@triton.jit
def unit_place(row, first_unit):
    """Index of a row's entry among scales (in pairs with minima) or sums; `first_unit` is that of row 0."""
    unit = first_unit + row // 16
    return ((unit // 2 * 8 + row % 8) * 2 + unit % 2) * 2 + row // 8 % 2


@triton.jit
def load_meta(meta, row, first_unit, seen):
    """Scale and minimum FP32 of rows; `meta` points to bytes."""
    at = meta.to(tl.pointer_type(tl.int32), bitcast=True) + unit_place(row, first_unit)
    words = tl.load(at, mask=seen, other=0)
    scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_meta(meta, row, first_unit, scale, minimum, seen):
    """Scale and minimum FP16 of rows."""
    at = meta.to(tl.pointer_type(tl.float16), bitcast=True) + 2 * unit_place(row, first_unit)
    tl.store(at, scale, mask=seen)
    tl.store(at + 1, minimum, mask=seen)


@triton.jit
def sums_pointer(sums, WIDE: tl.constexpr):
    """Bytes to elements of a sum's type."""
    return sums.to(tl.pointer_type(tl.int16), bitcast=True) if WIDE else sums


@triton.jit
def bytes_sum(sums, field, COLUMNS: tl.constexpr, TILE):
    """Sum INT32 of a row's masked code bytes, from the sum of its codes."""
    return (sums << (TILE.bits * field)) - tl.where(field == TILE.fields - 1, 128 * COLUMNS, 0)


@triton.jit
def sums_of(codes, field, TILE):
    """Σ codes INT32 per row of masked code bytes [R, C]: what a format without stored sums counts at every use."""
    flipped = tl.where(field == TILE.fields - 1, 128 * codes.shape[1], 0)
    return (tl.sum(codes.to(tl.int32), axis=1) + flipped) >> (TILE.bits * field)


@triton.jit
def store_codes(codes, packed, first_tile, TILE, TILES: tl.constexpr):
    """Write bytes [TILE.field_rows, 32 · TILES pad], fields joined, rows of one field in order, as stored tiles."""
    PAD: tl.constexpr = packed.shape[1] // 32
    split = tl.reshape(packed.to(tl.uint8) ^ 0x80, (TILE.down_pad, 2, 8, PAD, 2, 4, 4))
    ordered = tl.permute(split, (0, 3, 2, 5, 4, 1, 6))
    stored = tl.reshape(ordered, (TILE.down_pad, PAD, 512))
    down = tl.arange(0, TILE.down_pad)[:, None, None]
    across = tl.arange(0, PAD)[None, :, None]
    byte = tl.arange(0, 512)[None, None, :]
    at = codes + (down * TILE.across + first_tile + across) * 512 + byte
    tl.store(at, stored, mask=(down < TILE.down) & (across < TILES) & (byte >= 0))
