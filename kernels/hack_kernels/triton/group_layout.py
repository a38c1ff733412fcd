"""How a page of integer codes in groups rests in GPU memory: codecs `kivi-*` and `cachegen*`.

A *record* holds one page of one KV head: the planes of K in wire order, then the planes of V at `v.begin`. So the
planes of a pool are views, and pages travel as they rest. Groups of K lie along the rows of a channel, groups of V
along a row. Where codes are centred, a group of K or V is a row and has no minimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.read_format import LOW_BITS
from hack_kernels.triton.code_tiles import CodeTiles
from hack_kernels.triton.float_layout import SIDE_ALIGNMENT, WIDEST_STEP
from hack_kernels.triton.tiles import INTERPRETED


@dataclass(frozen=True, slots=True)
class GroupSide:
    """K or V of a record."""

    begin: int
    """Offset in the record."""
    bits: int
    group: int
    """Rows or channels that share a scale and a minimum."""
    values: int
    """Π·D."""
    centre: int = 0
    """C of centred codes; 0 where groups have a minimum."""

    @property
    def low_bits(self) -> int:
        """Bits of a code in the first plane."""
        return LOW_BITS.get(self.bits, self.bits)

    @property
    def high(self) -> int:
        """Offset in the record of the highest of five bits; of the scales with other widths."""
        return self.begin + self.values * self.low_bits // 8

    @property
    def scale(self) -> int:
        """Offset in the record of the scales, FP16."""
        return self.high + self.values * (self.bits - self.low_bits) // 8

    @property
    def minimum(self) -> int:
        """Offset in the record of the minima, FP16; where the side ends if codes are centred."""
        return self.scale + self.values // self.group * 2

    @property
    def end(self) -> int:
        """Where the next side may begin."""
        minima = 0 if self.centre else self.values // self.group * 2
        return -(-(self.minimum + minima) // SIDE_ALIGNMENT) * SIDE_ALIGNMENT

    @property
    def offsets(self) -> dict[str, int]:
        """Plane, without "k_" or "v_" -> its offset in the record."""
        found = {"codes": self.begin}
        if self.bits > self.low_bits:
            found["high"] = self.high
        found["scale"] = self.scale
        return found if self.centre else {**found, "min": self.minimum}

    @property
    def levels(self) -> int:
        """The largest number that the bits of a code hold."""
        return (1 << self.bits) - 1

    @property
    def widen_even(self) -> str:
        """PTX: the codes in the lowest bits of four bytes, less C, to two pairs of FP16."""
        return self._widen(0)

    @property
    def widen_odd(self) -> str:
        """PTX: the codes in the next bits of four bytes, less C, to two pairs of FP16."""
        return self._widen(self.bits)

    def _widen(self, place: int) -> str:
        """An FP16 whose upper byte is 0x64 is 1024 plus its lower byte, the code. 1024 + C is then subtracted."""
        origin = 0xE400 + self.centre
        return f"""{{
        .reg .b32 codes, low, high, origin;
        shr.b32 codes, $2, {place};
        and.b32 codes, codes, 0x{self.levels * 0x01010101:08x};
        mov.b32 origin, 0x{origin * 0x10001:08X};
        prmt.b32 low, codes, 0x64646464, 0x4140;
        prmt.b32 high, codes, 0x64646464, 0x4342;
        add.rn.f16x2 $0, low, origin;
        add.rn.f16x2 $1, high, origin;
        }}"""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The record of one page of one KV head. Kernels are compiled once per layout."""

    head_dim: int
    page_tokens: int
    k: GroupSide
    v: GroupSide
    dtype: tl.dtype = tl.float16
    """The type that queries, keys and weights are rounded to in decode."""
    own_codes: bool = False

    @property
    def root(self) -> float:
        """sqrt(D), by which scores are divided."""
        return math.sqrt(self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.v.end

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record of a page to the next head's."""
        return self.nbytes

    @property
    def v_tiles(self) -> CodeTiles:
        """Channels of V as prefill divides them: a byte for each value, so they stay in order."""
        return CodeTiles(self.head_dim, self.page_tokens, 8)

    @property
    def step(self) -> int:
        """Channels of K that decode multiplies at once."""
        return WIDEST_STEP

    @property
    def offsets(self) -> dict[str, int]:
        """See `RecordLayout`."""
        sides = (("k", self.k), ("v", self.v))
        return {f"{name}_{plane}": place for name, side in sides for plane, place in side.offsets.items()}


@lru_cache(maxsize=64)
def group_layout(fmt: GroupFormat) -> GroupLayout:
    """The layout of a format's pages."""

    def side(of: Grouping, begin: int) -> GroupSide:
        return GroupSide(begin, of.bits, of.group, fmt.page_tokens * fmt.head_dim, of.centre)

    k = side(fmt.k, 0)
    return GroupLayout(fmt.head_dim, fmt.page_tokens, k, side(fmt.v, k.end))


@triton.jit
def widened_codes(codes, ODD: tl.constexpr, SIDE: tl.constexpr):
    """Codes in the lowest bits of bytes, or with ODD in the next bits, less C, as FP16."""
    if INTERPRETED:
        whole = (codes.to(tl.int32) >> (SIDE.bits if ODD else 0)) & SIDE.levels
        return (whole - SIDE.centre).to(tl.float16)
    asm: tl.constexpr = SIDE.widen_odd if ODD else SIDE.widen_even
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)


@triton.jit
def halves_at(record, offset):
    """Bytes of a record as FP16."""
    return (record + offset).to(tl.pointer_type(tl.float16), bitcast=True)
