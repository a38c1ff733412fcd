"""The page format of error-bounded codes under Huffman codes: KVComp (arXiv 2509.00579).

A *unit* of values shares a step s and a first number n: x^ = (n + c)·s, and |x - x^| <= s/2. A unit is a block (all
rows and channels of a page), a channel or a token of a page (3.1.1). Its step is a share ρ of its range, so that
c <= 1/ρ + 1: codes have a closed alphabet of A symbols for all values. Planes in wire order, the contract of `install`
and `export` (those of `v` follow; U units, values in row order):

=========  =======  =======  =================================================================================
plane      shape    dtype    meaning
=========  =======  =======  =================================================================================
k_step     [U]      float16  s
k_first    [U]      int16    n = round(least / s)
k_book     [2]      uint8    the number of the page's book, and the centre
k_sizes    [16]     int16    bytes of each slice: a sixteenth of the page's codes
k_codes    [bytes]  uint8    the slices one after another, then zeros; the first bit of a code is the lowest
=========  =======  =======  =================================================================================

Coded sizes vary, but a page's place in a pool has a fixed size. So a page has *room*: a fixed number of bits a code. A
page that does not fit is quantized again with a larger step, `RUNGS` times ρ, until it fits. With a step as large as
the range every page fits. No symbol is lost, and bytes follow from the page's rows alone.

Books are static for the same reason. The books of KVComp follow from a prompt's histogram, which would make a page's
bytes depend on the rest of the prompt. A page chooses one of `SPREADS` and a centre; symbol (c - centre) mod A is
coded. Every symbol of the alphabet has a code, of at most 12 bits, so any bits decode to symbols. A number of a book or
of a centre that does not exist counts as the last.

s = max(ρ·(most - least), amax / 2^14) in FP32, at most 65504, rounded up to FP16, 1 where that is 0;
c = round(x / s) - n in FP32, ties to even. A page takes the book and the centre with the fewest bits, the first of
equals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import ReadFormat

SLICES: Final = 16
"""Parts of a page's codes that decode side by side."""

SLACK_BYTES: Final = 8
"""Zeros behind the last slice, so that a decoder can read whole words."""

LONGEST: Final = 12
"""Bits of the longest code, as published."""

MOST_SYMBOLS: Final = 4
"""Symbols that one look-up decodes at most."""

RUNGS: Final = (1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Factors of ρ, tried in this order until a page fits."""

SPREADS: Final = ((1, 1 / 6), (0, 0.7), (0, 1.0), (0, 1.4), (0, 2.0), (0, 2.8), (0, 4.0), (0, 8.0))
"""(flat, spread) of each book, in symbols. Symbols up to `flat` from the centre are as frequent as the centre. The
larger `spread` is, the more slowly frequencies fall beyond."""

HEAVIEST: Final = 1 << 16
"""The weight of a book's centre. The least weight is 1."""

LEAST_SCALE, MOST_SCALE = 0.02, 0.5
LEAST_ROOM, MOST_ROOM = 2.0, 8.0


class Unit(StrEnum):
    """Which values share a step."""

    BLOCK = "block"
    CHANNEL = "channel"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class HuffmanSide:
    """How K or V is kept."""

    unit: Unit
    scale: float
    """ρ: the step, as a share of the unit's range."""
    room: float
    """Bits for each code that a page has room for."""

    @property
    def symbols(self) -> int:
        """A. Rounding in FP32 adds less than 2^-7 to a quotient."""
        return math.floor(1 / self.scale + 1 + 2**-7) + 1

    @property
    def rungs(self) -> tuple[float, ...]:
        """The steps that a page tries, as shares of a unit's range, from ρ on; in FP32, as all backends take them."""
        wanted = torch.tensor([min(1.0, self.scale * rung) for rung in RUNGS], dtype=torch.float32).tolist()
        return tuple(dict.fromkeys(wanted))

    def check(self, name: str) -> None:
        """Raises `ValueError` naming what does not fit."""
        for what, value, least, most in (
            ("scale", self.scale, LEAST_SCALE, MOST_SCALE),
            ("room", self.room, LEAST_ROOM, MOST_ROOM),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}_{what} is {value}; it must lie between {least} and {most}")


@dataclass(frozen=True)
class HuffmanFormat(ReadFormat):
    """See the head of this file. Raises `ValueError` naming what does not fit."""

    head_dim: int
    k: HuffmanSide
    v: HuffmanSide
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fused: bool = True

    def __post_init__(self) -> None:
        """Check that slices are whole."""
        if self.elements % SLICES:
            raise ValueError(f"{self.page_tokens} rows of {self.head_dim} channels are not {SLICES} slices")
        for name in ("k", "v"):
            self.side(name).check(name)

    @property
    def elements(self) -> int:
        """The number of values of K (or of V) in a page."""
        return self.page_tokens * self.head_dim

    def side(self, name: str) -> HuffmanSide:
        """The settings of "k" or "v"."""
        return self.k if name == "k" else self.v

    def room_bits(self, name: str) -> int:
        """Bits that all codes of a page may take."""
        return int(self.elements * self.side(name).room)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then the planes of V."""
        return (*self._planes_of("k"), *self._planes_of("v"))

    def _planes_of(self, name: str) -> tuple[Plane, ...]:
        units = {Unit.BLOCK: 1, Unit.CHANNEL: self.head_dim, Unit.TOKEN: self.page_tokens}[self.side(name).unit]
        coded = -(-self.room_bits(name) // 8) + SLICES + SLACK_BYTES
        return (
            Plane(f"{name}_step", torch.float16, (units,)),
            Plane(f"{name}_first", torch.int16, (units,)),
            Plane(f"{name}_book", torch.uint8, (2,)),
            Plane(f"{name}_sizes", torch.int16, (SLICES,), most_sum=coded - SLACK_BYTES),
            Plane(f"{name}_codes", torch.uint8, (coded,)),
        )


@dataclass(frozen=True, slots=True)
class Books:
    """The codes of an alphabet of A symbols, in each of the B books."""

    codes: Tensor
    """[B, A] int32: a symbol's code, and from bit 16 on its length in bits."""
    lookup: Tensor
    """[B, 2^12] int64: for every 12 bits the symbols that lie in them, at most 4. The bytes of an entry, lowest first:
    the length of these symbols in bits, the 4 symbols, the length of the first symbol, 0, and the number of symbols."""

    def to(self, device: torch.device) -> Books:
        """A copy on another device."""
        return Books(self.codes.to(device), self.lookup.to(device))


@cache
def books_of(symbols: int) -> Books:
    """The books of an alphabet of `symbols` symbols."""
    made = [code_lengths(_weights(symbols, *spread)) for spread in SPREADS]
    codes = [canonical(lengths) for lengths in made]
    first = torch.zeros(len(made), 1 << LONGEST, dtype=torch.int64)
    for book, each in enumerate(codes):
        for symbol, entry in enumerate(each):
            first[book, entry & 0xFFFF :: 1 << (entry >> 16)] = symbol | entry >> 16 << 8
    held, bits, count = first & 0xFF, first >> 8, torch.ones_like(first)
    for _ in range(MOST_SYMBOLS - 1):
        following = first.gather(1, torch.arange(1 << LONGEST) >> bits)
        fits = (bits + (following >> 8) <= LONGEST) & (count < MOST_SYMBOLS)
        held |= torch.where(fits, (following & 0xFF) << 8 * count, 0)
        bits, count = bits + torch.where(fits, following >> 8, 0), count + fits
    lookup = bits | held << 8 | first >> 8 << 40 | count << 56
    return Books(torch.tensor(codes, dtype=torch.int32), lookup)


def _weights(symbols: int, flat: int, spread: float) -> list[int]:
    """The frequency that a book assumes for each symbol, by its distance from the centre in either direction.

    A t distribution, whose tails are like those of keys. It uses only sums, products and quotients, which are the same
    on every machine.
    """
    weights = []
    for symbol in range(symbols):
        far = max(0, min(symbol, symbols - symbol) - flat) / (2 * spread)
        tail = 1 + far * far
        weights.append(max(1, int(HEAVIEST / (tail * tail))))
    return weights


def code_lengths(weights: Sequence[int], longest: int = LONGEST) -> list[int]:
    """The length of each symbol in the best code with no length over `longest`, in bits (package-merge; Larmore and
    Hirschberg, 1990)."""
    coins = sorted((weight, (symbol,)) for symbol, weight in enumerate(weights))
    packages: list[tuple[int, tuple[int, ...]]] = list(coins)
    for _ in range(longest - 1):
        pairs = zip(packages[::2], packages[1::2], strict=False)
        packages = sorted([*coins, *((a[0] + b[0], a[1] + b[1]) for a, b in pairs)])
    bits = Counter(symbol for _, held in packages[: 2 * len(weights) - 2] for symbol in held)
    return [bits[symbol] for symbol in range(len(weights))]


def canonical(lengths: Sequence[int]) -> list[int]:
    """Each symbol's code, its first bit lowest, and from bit 16 on its length. Codes ascend by length and symbol."""
    entries, code, last = [0] * len(lengths), 0, 0
    for bits, symbol in sorted((bits, symbol) for symbol, bits in enumerate(lengths)):
        code <<= bits - last
        entries[symbol] = int(f"{code:0{bits}b}"[::-1], 2) | bits << 16
        code, last = code + 1, bits
    return entries
