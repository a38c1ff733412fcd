"""How a page of small floating-point numbers rests in GPU memory, and how its codes become numbers.

A *record* holds one page of one KV head: the planes of K in wire order, then the planes of V at `side_bytes`. So the
planes of a pool are views, and pages travel as they rest.

A code becomes FP16 by moving its bits; this also holds for subnormal codes. Its exponent, in FP16's place, is too small
by the difference of the biases, so the number is the code's value divided by `unit`. Kernels that multiply by the scale
multiply by `unit` too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import triton
import triton.language as tl

from hack_kernels.float_format import FloatFormat, Scaling
from hack_kernels.triton.code_tiles import CodeTiles
from hack_kernels.triton.tiles import INTERPRETED

FP16_EXPONENT: Final = 5
FP16_MANTISSA: Final = 10
FP16_BIAS: Final = 15
SIDE_ALIGNMENT: Final = 16
"""Bytes that a lane loads at once."""
WIDEST_STEP: Final = 32
"""Channels of K that decode multiplies at once."""


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """The record of one page of one KV head. Kernels are compiled once per layout."""

    head_dim: int
    page_tokens: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    finite: int
    block: int
    """Channels of a row that share a scale; all channels where the scale is the page's."""
    power: bool
    """Whether each block has a scale that is a power of two."""
    twofold: bool
    """Whether each block has a scale in E4M3, which is multiplied by the page's gain."""
    dtype: tl.dtype = tl.float16
    """The type that queries and weights are rounded to in decode."""
    own_codes: bool = False

    @property
    def root(self) -> float:
        """sqrt(D), by which scores are divided."""
        return math.sqrt(self.head_dim)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def low_bits(self) -> int:
        """Bits of a code in the first plane."""
        return 4 if self.bits == 6 else self.bits

    @property
    def high(self) -> int:
        """Offset in a side of the upper two of six bits; of the scales with other widths."""
        return self.page_tokens * self.head_dim * self.low_bits // 8

    @property
    def scale(self) -> int:
        """Offset in a side of the scales."""
        return self.high + self.page_tokens * self.head_dim * (self.bits - self.low_bits) // 8

    @property
    def row_scales(self) -> int:
        """Scales of a row, a byte each; 0 where a page has one."""
        return self.head_dim // self.block if self.power or self.twofold else 0

    @property
    def gain(self) -> int:
        """Offset in a side of the page's FP32 factor."""
        return self.scale + self.page_tokens * self.row_scales

    @property
    def side_bytes(self) -> int:
        """Bytes of K, and of V."""
        return -(-(self.gain + (0 if self.power else 4)) // SIDE_ALIGNMENT) * SIDE_ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return 2 * self.side_bytes

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head's record of a page to the next head's."""
        return self.nbytes

    @property
    def v_tiles(self) -> CodeTiles:
        """Channels of V as prefill divides them: a byte for each number, so they stay in order."""
        return CodeTiles(self.head_dim, self.page_tokens, 8)

    @property
    def step(self) -> int:
        """Channels of K that decode multiplies at once: they share a scale."""
        return min(self.block, WIDEST_STEP)

    @property
    def unit(self) -> float:
        """The ratio of a code's value to the FP16 number that its bits make."""
        return float(2 ** (FP16_BIAS - (2 ** (self.exponent_bits - 1) - 1)))

    @property
    def moved(self) -> int:
        """Places by which all bits but the sign move down, from the upper end of FP16 to their places in it."""
        return FP16_EXPONENT - self.exponent_bits

    @property
    def kept(self) -> int:
        """The mask of the moved bits in FP16."""
        return ((1 << (self.bits - 1)) - 1) << (FP16_MANTISSA - self.mantissa_bits)

    @property
    def widen_upper(self) -> str:
        """PTX: four bytes, each with a code at its upper end, to two pairs of FP16."""
        return self._widen("mov.b32 codes, $2;")

    @property
    def widen_lower(self) -> str:
        """PTX: four bytes, each with a code in its lower half, to two pairs of FP16."""
        return self._widen("shl.b32 codes, $2, 4;")

    def _widen(self, first: str) -> str:
        """Each byte goes to the upper half of an FP16, whose sign is then in place."""
        both = f"0x{self.kept:04x}{self.kept:04x}"
        halves = "".join(
            f"""
            prmt.b32 half, codes, 0, {order};
            shr.b32 moved, half, {self.moved};
            and.b32 moved, moved, {both};
            lop3.b32 {to}, half, 0x80008000, moved, 0xEA;"""
            for to, order in (("$0", "0x1404"), ("$1", "0x3424"))
        )
        return f"{{ .reg .b32 codes, half, moved; {first}{halves} }}"

    @property
    def offsets(self) -> dict[str, int]:
        """See `RecordLayout`."""
        side = {"": 0}
        if self.low_bits < self.bits:
            side["_high"] = self.high
        side["_scale"] = self.scale
        if self.twofold:
            side["_gain"] = self.gain
        return {
            f"{name}{plane}": begin + offset
            for name, begin in (("k", 0), ("v", self.side_bytes))
            for plane, offset in side.items()
        }


@lru_cache(maxsize=64)
def float_layout(fmt: FloatFormat) -> FloatLayout:
    """The layout of a format's pages."""
    return FloatLayout(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        exponent_bits=fmt.element.exponent_bits,
        mantissa_bits=fmt.element.mantissa_bits,
        largest=fmt.element.largest,
        finite=fmt.element.finite,
        block=fmt.block,
        power=fmt.scaling is Scaling.POWER,
        twofold=fmt.scaling is Scaling.TWOFOLD,
    )


@triton.jit
def widened(codes, LOWER: tl.constexpr, LAYOUT: tl.constexpr):
    """Bytes with a code each, at the upper end or in the lower half, as FP16 over `unit`; other bits do not count."""
    if INTERPRETED:
        half = (codes.to(tl.int32) << (12 if LOWER else 8)) & 0xFFFF
        return ((half & 0x8000) | ((half >> LAYOUT.moved) & LAYOUT.kept)).to(tl.int16).to(tl.float16, bitcast=True)
    asm: tl.constexpr = LAYOUT.widen_lower if LOWER else LAYOUT.widen_upper
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)


@triton.jit
def row_scales(scales, LAYOUT: tl.constexpr):
    """Scales of blocks FP32, from their bytes; E4M3 without the gain of the page."""
    if LAYOUT.power:
        return tl.maximum(scales.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    half = (scales.to(tl.int32) << 7).to(tl.int16)  # not negative
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def page_factor(side, LAYOUT: tl.constexpr):
    """The page's FP32 factor of all numbers of K or V at `side`, beside scales of blocks. With `power` there is
    none."""
    return tl.load((side + LAYOUT.gain).to(tl.pointer_type(tl.float32), bitcast=True))
