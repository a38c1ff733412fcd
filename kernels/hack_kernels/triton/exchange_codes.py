"""Words of codes between the wire's order and the order at rest.

Both orders are 32-bit words of codes, and both have the same six axes. The wire has the order (tile down, row half,
row, tile across, column half, quad), a record the order (tile down, tile across, row, quad, column half, row half). The
two also differ in which codes share a byte. A byte at rest holds one code of each of F code tiles, its *fields*; a byte
on the wire holds F consecutive tokens. So the codes of F words on one side, taken F apart, are the codes of F words on
the other. This *transpose* of a square of codes is the only arithmetic:

    K: word b of the wire has tokens b·F .. b·F+F-1 of 4 channels; at rest each of them is in a word of its own.
    V: word b of the wire has 4·F tokens of a channel; at rest each 4 of them are in a word of their own.

V's tokens rest in zipped order (`code_tiles.py`). So two words of four tokens, which are 8 tokens apart, are zipped
byte by byte into two words at rest. If a word of the wire has 16 tokens or more, the two are parts of it; otherwise
they are parts of two words of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_at(pages):
    """Pointers to bytes as pointers to 32-bit words, along axis 1."""
    return pages.to(tl.pointer_type(tl.uint32), bitcast=True)[:, None]


@triton.jit
def wire_place(field, TILE, OF_K: tl.constexpr):
    """The places of one field's words in a plane in wire order, [1, WORDS], and whether they exist."""
    down = tl.arange(0, TILE.exchange_words)[None, :]
    if OF_K:
        LINES: tl.constexpr = 16 // TILE.fields  # lines of the wire in a row tile
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
        WORDS: tl.constexpr = 4 * TILE.columns // TILE.fields  # words of a row tile
        row_tile = down // WORDS * TILE.row_fields + field
        place = row_tile * WORDS + down % WORDS
        there = row_tile < TILE.rows // 16
    return place, there


@triton.constexpr_function
def quads_of(TILE, OF_K):
    """Words of a row of one part, in a half of the columns of a tile."""
    return 4 if OF_K or TILE.fields == 1 else 2 if TILE.fields == 2 else 1


@triton.constexpr_function
def halves_of(TILE, OF_K):
    """Halves of columns that one part has. A word holds 32 codes of V of one bit, so each part then has one half."""
    return 1 if TILE.fields == 8 and not OF_K else 2


@triton.jit
def rest_place(part, TILE, OF_K: tl.constexpr):
    """The places of one part's words in a record, [1, WORDS], and whether they exist."""
    ROWS: tl.constexpr = 8 // TILE.fields if OF_K else 8
    QUADS: tl.constexpr = quads_of(TILE, OF_K)
    HALVES: tl.constexpr = 2 * halves_of(TILE, OF_K)
    at = tl.arange(0, TILE.exchange_words)[None, :]
    quad, row = at // HALVES % QUADS, at // (HALVES * QUADS) % ROWS
    if OF_K:
        row = row * TILE.fields + part
    else:
        quad = part % 4 * QUADS + quad
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
def zip_words(low, high):
    """Words of four tokens k.. and k+8.., byte by byte in zipped order: two words."""
    first = low & 0xFF | (high & 0xFF) << 8 | (low & 0xFF00) << 8 | (high & 0xFF00) << 16
    second = (low >> 16) & 0xFF | (high >> 8) & 0xFF00 | (low >> 8) & 0xFF0000 | high & 0xFF000000
    return first, second


@triton.jit
def unzip_words(first, second):
    """Inverse of `zip_words`."""
    low = first & 0xFF | (first >> 8) & 0xFF00 | (second & 0xFF) << 16 | (second & 0xFF0000) << 8
    high = (first >> 8) & 0xFF | (first >> 16) & 0xFF00 | (second << 8) & 0xFF0000 | second & 0xFF000000
    return low, high


@triton.jit
def zip_quads(words, QUADS: tl.constexpr):
    """`zip_words` of words in wire order whose QUADS quads of a row are side by side, in place."""
    split = tl.reshape(words, (words.shape[0], words.shape[1] // QUADS, 2, QUADS // 2))
    low, high = tl.split(tl.permute(split, (0, 1, 3, 2)))
    first, second = zip_words(low, high)
    return tl.reshape(tl.join(first, second), words.shape)


@triton.jit
def unzip_quads(words, QUADS: tl.constexpr):
    """Inverse of `zip_quads`."""
    first, second = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // QUADS, QUADS // 2, 2)))
    low, high = unzip_words(first, second)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), words.shape)


@triton.jit
def packed_part(words, part, TILE, OF_K: tl.constexpr):
    """One part of the words of all fields, as bytes at rest, in wire order."""
    FIELDS: tl.constexpr = TILE.fields
    packed = tl.full(words[0].shape, 0x80808080, tl.uint32)
    for field in tl.static_range(FIELDS):
        packed ^= part_of_word(words[field], part, TILE, OF_K) << (TILE.bits * field)
    return packed


@triton.jit
def store_part(words, rest, part, present, TILE, OF_K: tl.constexpr):
    """Words of a part in wire order to records."""
    place, there = rest_place(part, TILE, OF_K)
    tl.store(words_at(rest) + place, to_rest_order(words, TILE, OF_K), mask=present & there)


@triton.jit
def load_part(rest, part, present, TILE, OF_K: tl.constexpr):
    """Inverse of `store_part`, with no bit flipped."""
    place, there = rest_place(part, TILE, OF_K)
    words = tl.load(words_at(rest) + place, mask=present & there, other=0) ^ 0x80808080
    return to_wire_order(words, TILE, OF_K)


@triton.jit
def install_codes(words, rest, present, TILE, OF_K: tl.constexpr):
    """Words in wire order to records."""
    FIELDS: tl.constexpr = TILE.fields
    for part in tl.static_range(FIELDS):
        if OF_K:
            store_part(packed_part(words, part, TILE, OF_K), rest, part, present, TILE, OF_K)
        elif FIELDS < 4:
            zipped = zip_quads(packed_part(words, part, TILE, OF_K), quads_of(TILE, OF_K))
            store_part(zipped, rest, part, present, TILE, OF_K)
        elif part % 4 < 2:
            low, high = packed_part(words, part, TILE, OF_K), packed_part(words, part + 2, TILE, OF_K)
            first, second = zip_words(low, high)
            store_part(first, rest, part + part % 4, present, TILE, OF_K)
            store_part(second, rest, part + part % 4 + 1, present, TILE, OF_K)


@triton.jit
def load_parts(rest, present, TILE, OF_K: tl.constexpr):
    """All parts of records, in wire order: a tuple."""
    FIELDS: tl.constexpr = TILE.fields
    parts = ()
    if OF_K:
        for part in tl.static_range(FIELDS):
            parts = parts + (load_part(rest, part, present, TILE, OF_K),)
    elif FIELDS < 4:
        for part in tl.static_range(FIELDS):
            zipped = load_part(rest, part, present, TILE, OF_K)
            parts = parts + (unzip_quads(zipped, quads_of(TILE, OF_K)),)
    else:
        for four in tl.static_range(0, FIELDS, 4):
            low, high = unzip_words(
                load_part(rest, four, present, TILE, OF_K), load_part(rest, four + 1, present, TILE, OF_K)
            )
            more_low, more_high = unzip_words(
                load_part(rest, four + 2, present, TILE, OF_K), load_part(rest, four + 3, present, TILE, OF_K)
            )
            parts = parts + (low, more_low, high, more_high)
    return parts


@triton.jit
def export_codes(rest, wire, present, TILE, OF_K: tl.constexpr):
    """Records to a plane in wire order."""
    FIELDS: tl.constexpr = TILE.fields
    parts = load_parts(rest, present, TILE, OF_K)
    for field in tl.static_range(FIELDS):
        packed = tl.zeros(parts[0].shape, tl.uint32)
        for part in tl.static_range(FIELDS):
            spread = (parts[part] >> (TILE.bits * field)) & (TILE.levels * 0x01010101)
            packed |= word_of_part(spread, part, TILE, OF_K)
        place, there = wire_place(field, TILE, OF_K)
        tl.store(words_at(wire) + place, packed, mask=present & there)
