"""Device functions that read and write the parts of a record (`layout.py`): code tiles, metadata, sums.

Two forms. In decode, W warps read W pages at once (`load_tile` to `load_sums`). Axis 0 of every tensor is the warp, and
nothing crosses from one warp to another. Tiles, fields and units are known when the kernel is compiled, so bytes are
operands in the very registers that they are loaded to. Elsewhere a program has one page, and rows are tensors
(`load_codes` to `store_codes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BEYOND_HALF = tl.constexpr(65520.0)
"""The smallest number that FP16 rounds to infinity."""
LINE = tl.constexpr(128)
"""Bytes of a line of the caches."""


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """FP32 to the nearest value of a type, ties to even. Triton's interpreter would truncate BF16, and make 0 another
    number."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)  # NaN stays NaN
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def prefetch(start, NBYTES: tl.constexpr):
    """Ask that NBYTES bytes from each of `start` [W] on come to the second-level cache. Nothing waits for them."""
    if not INTERPRETED:
        LINES: tl.constexpr = (NBYTES + LINE - 1) // LINE
        first = start.to(tl.int64, bitcast=True)[:, None]
        for begin in tl.static_range(0, LINES, 32):
            line = tl.minimum(begin + tl.arange(0, 32), LINES - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [first + line * LINE],
                tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def load_tile(codes, index: tl.constexpr, W: tl.constexpr):
    """Stored tile `index` of W pages whose codes begin at `codes` [W] uint8: int8 [W, 16, 32].

    One 16-byte load per lane; the reordering names registers and moves nothing.
    """
    packed = tl.load(codes[:, None] + (index * 512 + tl.arange(0, 512))[None, :])
    split = tl.reshape(packed.to(tl.int8, bitcast=True), (W, 8, 4, 2, 2, 4))
    return tl.reshape(tl.permute(split, (0, 4, 1, 3, 2, 5)), (W, 16, 32))


@triton.jit
def load_tiles(codes, FIRST: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    """Stored tiles FIRST.. of W pages: a tuple."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (load_tile(codes, FIRST + i, W),)
    return tiles


@triton.constexpr_function
def rows_ahead(TILE):
    """Rows of stored tiles that decode asks for before it needs them. A row of more than two tiles would spill."""
    return 1 if TILE.across <= 2 else 0


@triton.jit
def load_row_once(held, codes, row: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr):
    """`held`, a tuple of the first rows of stored tiles, with row `row` behind it if that is missing and exists."""
    if row == len(held) and row < TILE.down:
        held = held + (load_tiles(codes, row * TILE.across, TILE.across, W),)
    return held


@triton.jit
def zipped(place):
    """The token at a place of zipped order (`code_tiles.py`)."""
    return place // 16 * 16 + place % 2 * 8 + place % 16 // 2


@triton.jit
def pair_of_tiles(first, second, W: tl.constexpr, N: tl.constexpr):
    """Weights of two token tiles INT8 [W, 16, N] as the operand [W, 32, N] of V's columns, in zipped order.

    Triton 3.6 and 3.7 give an operand another order of lanes if they see a `join` behind it, and so move it through
    shared memory. They do not look past an operation with side effects, so here is one that does nothing.
    """
    both = tl.reshape(tl.permute(tl.join(first, second), (0, 3, 1, 2)), (W, 2, 2, 8, N))
    if not INTERPRETED:
        both = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [both], tl.int8, is_pure=False, pack=4)
    return tl.reshape(tl.permute(both, (0, 1, 3, 2, 4)), (W, 32, N))


@triton.jit
def masked(tiles, field: tl.constexpr, TILE: tl.constexpr):
    """Codes in bit field `field`, as int8 worth code·2^(bits·field), less 128 in the last field."""
    mask: tl.constexpr = TILE.levels << (TILE.bits * field)
    signed: tl.constexpr = mask - 256 if mask > 127 else mask
    if INTERPRETED:
        return tiles & signed
    # Four codes per instruction, in assembly, because Triton keeps LLVM from combining codes itself on sm_80.
    masks = tl.full(tiles.shape, signed, tl.int8)
    return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [tiles, masks], tl.int8, is_pure=True, pack=4)


@triton.jit
def scale_and_minimum(words):
    """Metadata as they rest, INT32 -> scale and minimum, FP32 each."""
    scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_unit(meta, unit: tl.constexpr, W: tl.constexpr):
    """Scale and minimum of a unit of W pages whose metadata begin at `meta` [W] uint8: two of FP32 [W, 16]."""
    place = (unit // 2) * 32 + (unit % 2) * 2 + tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 2)[None, :]
    words = tl.load(meta.to(tl.pointer_type(tl.int32))[:, None, None] + place[None, :, :])
    return scale_and_minimum(tl.reshape(tl.permute(words, (0, 2, 1)), (W, 16)))


@triton.jit
def sums_pointer(sums, WIDE: tl.constexpr):
    """Bytes to elements of a sum's type."""
    return sums.to(tl.pointer_type(tl.int16), bitcast=True) if WIDE else sums


@triton.jit
def load_sums(sums, WIDE: tl.constexpr, unit: tl.constexpr, W: tl.constexpr):
    """Sums (int16 if `WIDE`, else uint8) of a unit of W pages, which begin at `sums` [W] uint8: INT32 [W, 16]."""
    row = tl.arange(0, 16)
    place = (unit // 2) * 32 + (row % 8) * 4 + (unit % 2) * 2 + row // 8
    return tl.load(sums_pointer(sums, WIDE)[:, None] + place[None, :]).to(tl.int32)


@triton.jit
def equal_halves(x, W: tl.constexpr, N: tl.constexpr):
    """[W, 16, N] whose rows are equal as [W, 8, N]: a lane holds rows r and r + 8, so nothing moves."""
    halves = tl.permute(tl.reshape(x, (W, 2, 8, N)), (0, 2, 3, 1))
    return tl.split(halves)[0]


@triton.jit
def doubled(x, W: tl.constexpr, N: tl.constexpr):
    """[W, 8, N] whose rows are equal as [W, 16, N]: the same registers, each named twice."""
    return tl.reshape(tl.permute(tl.join(x, x), (0, 3, 1, 2)), (W, 16, N))


@triton.jit
def load_codes(
    codes, TILE, first_field, FIELDS: tl.constexpr, first_down, DOWN: tl.constexpr, first_across, ACROSS: tl.constexpr
):
    """Masked code bytes INT8 [DOWN · FIELDS · 16, 32 · ACROSS pad], worth code · 2^(bits · field).

    The codes are FIELDS fields of DOWN x ACROSS stored tiles. Every field reads the same bytes, 16 a load, and keeps
    its own bits. So rows are in order, and all reads but the first hit the nearest cache. Rows and columns past the
    matrix are code 0. Tokens are in zipped order: V's columns as they rest, K's rows here.
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
    split = tl.permute(split, (1, 0, 6, 3, 2, 5, 4, 7) if TILE.zipped else (1, 0, 3, 6, 2, 5, 4, 7))
    return tl.reshape(split, (DOWN * FIELDS * 16, PAD * 32))


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
    return scale_and_minimum(tl.load(at, mask=seen, other=0))


@triton.jit
def meta_word(scale, low):
    """Scale FP16 and minimum FP32 of rows as they rest, INT32."""
    minimum = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (minimum << 16)


@triton.jit
def store_meta(meta, row, first_unit, words, seen):
    """Scales and minima of rows, as `meta_word`."""
    at = meta.to(tl.pointer_type(tl.int32), bitcast=True) + unit_place(row, first_unit)
    tl.store(at, words, mask=seen)


@triton.jit
def bytes_sum(sums, field, COLUMNS: tl.constexpr, TILE):
    """Sum INT32 of a row's masked code bytes, from the sum of its codes."""
    return (sums << (TILE.bits * field)) - tl.where(field == TILE.fields - 1, 128 * COLUMNS, 0)


@triton.jit
def sums_of(codes, field, TILE):
    """Σ codes INT32 per row of masked code bytes [R, C]. Formats without stored sums count them at every use."""
    flipped = tl.where(field == TILE.fields - 1, 128 * codes.shape[1], 0)
    return (tl.sum(codes.to(tl.int32), axis=1) + flipped) >> (TILE.bits * field)


@triton.jit
def store_codes(codes, packed, first_tile, TILE, TILES: tl.constexpr):
    """Write bytes [TILE.field_rows, 32 · TILES pad], fields joined, rows of one field in order, as stored tiles.
    Columns are in the order in which they rest."""
    PAD: tl.constexpr = packed.shape[1] // 32
    split = tl.reshape(packed.to(tl.uint8) ^ 0x80, (TILE.down_pad, 2, 8, PAD, 2, 4, 4))
    ordered = tl.permute(split, (0, 3, 2, 5, 4, 1, 6))
    stored = tl.reshape(ordered, (TILE.down_pad, PAD, 512))
    down = tl.arange(0, TILE.down_pad)[:, None, None]
    across = tl.arange(0, PAD)[None, :, None]
    byte = tl.arange(0, 512)[None, None, :]
    at = codes + (down * TILE.across + first_tile + across) * 512 + byte
    tl.store(at, stored, mask=(down < TILE.down) & (across < TILES) & (byte >= 0))
