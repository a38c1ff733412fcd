"""Decode over pages of Huffman codes: codec `kvcomp`.

As in KVComp's kernel, codes are decoded where they are multiplied. The sixteen slices of a page are decoded side by
side, two lanes for each, code by code. A slice has whole rows, so the slices' next sixteen codes are the same sixteen
channels of sixteen rows: a tile for the matrix unit. The two lanes of a slice decode the same codes, and each keeps
eight of the sixteen.

The tables are INT16 [2, books, 2^12], for K and for V: what 12 bits begin with, a symbol and from bit 8 on its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.huffman_format import LONGEST, SLACK_BYTES, SLICES, SPREADS, HuffmanFormat, Unit, books_of
from hack_kernels.triton.float_query import product, weights_of
from hack_kernels.triton.read_layout import STEP, ReadLayout, one_after_another, rounded_half

ROWS = tl.constexpr(SLICES)
"""Rows of a tile, one of each slice."""
COLUMNS = tl.constexpr(16)
"""Channels of a tile."""
WINDOWS = tl.constexpr(1 << LONGEST)
"""Entries of a book's table."""


@dataclass(frozen=True, slots=True)
class HuffmanPart:
    """K or V of a record."""

    step: int
    """Offset in the record of the steps of units."""
    first: int
    """Offset in the record of the first numbers of units."""
    book: int
    """Offset in the record of the number of the book and of the centre."""
    sizes: int
    """Offset in the record of the bytes of slices."""
    codes: int
    """Offset in the record of the slices."""
    last_bit: int
    """Where a decoder stops that bits without meaning lead too far."""
    symbols: int
    """A."""
    by_channel: bool
    by_token: bool
    """Whether channels, or tokens, have units of their own."""
    lookup: int
    """Where the books begin in the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuffmanLayout(ReadLayout):
    """A record of Huffman codes."""

    k: HuffmanPart
    v: HuffmanPart
    books: int

    @property
    def slice_rows(self) -> int:
        """Rows of a slice."""
        return self.page_tokens // SLICES


@lru_cache(maxsize=64)
def huffman_layout(fmt: HuffmanFormat) -> HuffmanLayout:
    """The layout of a format's pages."""
    places, nbytes = one_after_another(fmt.planes)
    at, coded = dict(places), {plane.name: plane.page_bytes for plane in fmt.planes}

    def part(name: str, lookup: int) -> HuffmanPart:
        side = fmt.side(name)
        return HuffmanPart(
            step=at[f"{name}_step"],
            first=at[f"{name}_first"],
            book=at[f"{name}_book"],
            sizes=at[f"{name}_sizes"],
            codes=at[f"{name}_codes"],
            last_bit=8 * (coded[f"{name}_codes"] - SLACK_BYTES),
            symbols=side.symbols,
            by_channel=side.unit is Unit.CHANNEL,
            by_token=side.unit is Unit.TOKEN,
            lookup=lookup,
        )

    return HuffmanLayout(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        places=places,
        nbytes=nbytes,
        step=STEP,
        k=part("k", 0),
        v=part("v", len(SPREADS) << LONGEST),
        books=len(SPREADS),
    )


def kernel_tables(fmt: HuffmanFormat, device: torch.device) -> Tensor:
    """The tables that kernels read."""
    found = torch.stack([books_of(fmt.side(name).symbols).lookup for name in ("k", "v")])
    return (found >> 8 & 0xFF | (found >> 40 & 0xFF) << 8).to(device, torch.int16)


@triton.jit
def words_at(record, offset, place):
    """INT16 numbers of pages at `record` [W], as INT32 [W, places]."""
    plane = (record + offset).to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(plane[:, None] + place[None, :]).to(tl.int32)


@triton.jit
def begin_of_slices(record, PART: tl.constexpr):
    """The first bits of the slices INT32 [W, 32, 1], once for each lane."""
    slice_of_lane, each = tl.arange(0, 2 * ROWS) // 2, tl.arange(0, ROWS)
    before = each[None, :] < slice_of_lane[:, None]
    sizes = tl.where(before[None, :, :], words_at(record, PART.sizes, each)[:, None, :], 0)
    return tl.minimum(tl.maximum(tl.sum(sizes, 2) * 8, 0), PART.last_bit)[:, :, None]


@triton.jit
def book_of(record, PART: tl.constexpr, LAYOUT: tl.constexpr, tables):
    """The table of each page's book [W], and the pages' centres INT32 [W]. What does not exist counts as the last."""
    book = tl.minimum(tl.load(record + PART.book).to(tl.int32), LAYOUT.books - 1)
    centre = tl.minimum(tl.load(record + PART.book + 1).to(tl.int32), PART.symbols - 1)
    return tables + PART.lookup + book * WINDOWS, centre


@triton.jit
def next_symbols(coded, at, book, PART: tl.constexpr, W: tl.constexpr):
    """The next 16 symbols of every slice INT32 [W, 16 slices, 16], and the bits [W, 32, 1] that follow them.

    Positions have the last axis so that Triton gives each lane one, and with it eight symbols: nothing moves between
    lanes until the tile is whole.
    """
    place = (tl.arange(0, 2 * ROWS) % 2 * 8)[:, None] + tl.arange(0, 8)[None, :]
    found = tl.zeros((W, 2 * ROWS, 8), tl.int32)
    for i in range(COLUMNS):
        byte = coded[:, None, None] + (at >> 3)
        word = tl.load(byte).to(tl.int32) | tl.load(byte + 1).to(tl.int32) << 8 | tl.load(byte + 2).to(tl.int32) << 16
        entry = tl.load(book[:, None, None] + (word >> (at & 7) & (WINDOWS - 1))).to(tl.int32)
        found = tl.where(place[None, :, :] == i, entry & 0xFF, found)
        at = tl.minimum(at + (entry >> 8), PART.last_bit)
    return tl.reshape(found, (W, ROWS, COLUMNS)), at


@triton.jit
def numbers_of(symbols, centre, record, row, channel, PART: tl.constexpr):
    """A tile of symbols as the FP16 numbers that they stand for, [W, rows, channels]."""
    codes = symbols + centre[:, None, None]
    codes = tl.where(codes >= PART.symbols, codes - PART.symbols, codes)
    unit = tl.zeros((1,), tl.int32)
    if PART.by_channel:
        unit = channel
    elif PART.by_token:
        unit = row
    step = words_at(record, PART.step, unit).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = words_at(record, PART.first, unit)
    if PART.by_token:
        x = (codes + least[:, :, None]).to(tl.float32) * step[:, :, None]
    else:
        x = (codes + least[:, None, :]).to(tl.float32) * step[:, None, :]
    return rounded_half(x)


@triton.jit
def add_huffman_pages(state, record, _, valid, query, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """See `paged.decode_kernel`. Slices go on where the tile before ended."""
    D: tl.constexpr = LAYOUT.head_dim
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    tables = query[D // LAYOUT.step]
    k_book, k_centre = book_of(record, K, LAYOUT, tables)
    v_book, v_centre = book_of(record, V, LAYOUT, tables)
    k_at, v_at = begin_of_slices(record, K), begin_of_slices(record, V)
    for j in tl.range(0, LAYOUT.slice_rows, num_stages=1, disable_licm=True):
        top, weight, out = state
        row, column = tl.arange(0, ROWS) * LAYOUT.slice_rows + j, tl.arange(0, COLUMNS)
        score = tl.zeros((W, ROWS, N), tl.float32)
        for c in tl.static_range(D // COLUMNS):
            symbols, k_at = next_symbols(record + K.codes, k_at, k_book, K, W)
            keys = numbers_of(symbols, k_centre, record, row, c * COLUMNS + column, K)
            score = product(keys, query[c], score)
        new_top, kept, p, weight = weights_of(top, weight, score, valid, W, N)
        added = ()
        for m in tl.static_range(D // COLUMNS):
            symbols, v_at = next_symbols(record + V.codes, v_at, v_book, V, W)
            values = numbers_of(symbols, v_centre, record, row, m * COLUMNS + column, V)
            added = added + (product(tl.permute(values, (0, 2, 1)), p, out[m] * kept[:, None, :]),)
        state = (new_top, weight, added)
    return state
