"""The page format of small floating-point numbers: FP8, the MX formats and NVFP4, one family.

An element has a sign, an exponent and a mantissa. A code's value is multiplied by the scale of its block of channels. K
and V each have their own scales. Planes in wire order, the contract of `install` and `export` (`k`; those of `v`
follow):

=========  ==================  =======  =================================================================
plane      shape               dtype    meaning
=========  ==================  =======  =================================================================
k          [Π·b/8, D]          uint8    codes of b bits, packed along rows (`read_format.py`); b is 4 where 6 are
k_high     [Π/4, D]            uint8    only with 6 bits: the upper two
k_scale    [1]                 float32  `Scaling.PAGE`
k_scale    [Π, D/32]           uint8    `Scaling.POWER`: E8M0, 2^(byte - 127)
k_scale    [Π, D/16]           uint8    `Scaling.TWOFOLD`: E4M3, of a block relative to the page
k_gain     [1]                 float32  `Scaling.TWOFOLD`
=========  ==================  =======  =================================================================

Elements round to nearest, ties to the even code, and saturate. With a(x) the largest magnitude of x and L the
element's largest value:

- PAGE: s = a(page) / L, rounded up in FP32, so nothing saturates; 1 for a page of zeros.
- POWER (OCP Microscaling v1.0, §6.3): s = 2^(floor(log2 a(block)) - e), e the exponent of L; up to a quarter of the
  largest magnitude saturates. The least byte is 0; a block of zeros has it.
- TWOFOLD (NVFP4): G = a(page) / (448 L), 1 for a page of zeros; S = E4M3(a(block) / (L·G)); s = S·G in FP32. The outer
  scale G belongs to a page and head, so it needs no calibration. A block whose S is 0 has codes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.read_format import ReadFormat, packed_planes


class Element(StrEnum):
    """A kind of number, by its bits of exponent and mantissa. None has infinities."""

    E4M3 = "e4m3"
    E3M2 = "e3m2"
    E2M3 = "e2m3"
    E2M1 = "e2m1"

    @property
    def exponent_bits(self) -> int:
        """Bits of the exponent."""
        return int(self.value[1])

    @property
    def mantissa_bits(self) -> int:
        """Bits of the mantissa."""
        return int(self.value[3])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sizes(self) -> Tensor:
        """[2^(bits - 1)] float32, ascending: the values of the codes without a sign."""
        return self.sizes_on(torch.device("cpu"))

    def sizes_on(self, device: torch.device) -> Tensor:
        """`sizes`, computed on `device`, because a copy from host memory would wait for the device."""
        codes = torch.arange(2 ** (self.bits - 1), device=device)
        exponent, mantissa = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        normal = exponent > 0
        fraction = mantissa / 2**self.mantissa_bits + normal
        bias = 2 ** (self.exponent_bits - 1) - 1
        return torch.ldexp(fraction, exponent.clamp(min=1) - bias).float()

    @property
    def finite(self) -> int:
        """The number of codes without a sign that are numbers. The last code of E4M3 is NaN, and is never written."""
        codes: int = 2 ** (self.bits - 1)
        return codes - (self is Element.E4M3)

    @property
    def largest(self) -> float:
        """L."""
        return float(self.sizes[self.finite - 1])


class Scaling(StrEnum):
    """The factor of a code's value."""

    PAGE = "page"
    """An FP32 number of the page."""
    POWER = "power"
    """A power of two for every 32 channels of a row (MX)."""
    TWOFOLD = "twofold"
    """An E4M3 number for every 16 channels of a row, times an FP32 number of the page (NVFP4)."""


BLOCK: Final = {Scaling.POWER: 32, Scaling.TWOFOLD: 16}
"""Channels that share a scale."""


@dataclass(frozen=True)
class FloatFormat(ReadFormat):
    """See the head of this file. Raises `ValueError` naming a shape that blocks do not divide."""

    head_dim: int
    element: Element = Element.E4M3
    scaling: Scaling = Scaling.PAGE
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fused: bool = True

    def __post_init__(self) -> None:
        """Check that blocks are whole."""
        if self.head_dim % self.block:
            raise ValueError(f"head_dim is {self.head_dim}; blocks of {self.block} channels do not divide it")
        if self.page_tokens % 8:
            raise ValueError(f"page_tokens is {self.page_tokens}; it must be a multiple of 8")

    @property
    def block(self) -> int:
        """Channels of a row that share a scale."""
        return BLOCK.get(self.scaling, self.head_dim)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of K, then the planes of V."""
        return (*self._planes_of("k"), *self._planes_of("v"))

    def _planes_of(self, name: str) -> tuple[Plane, ...]:
        codes = packed_planes(name, self.element.bits, self.page_tokens, self.head_dim)
        whole = Plane(f"{name}_scale", torch.float32, (1,))
        if self.scaling is Scaling.PAGE:
            return (*codes, whole)
        blocks = Plane(f"{name}_scale", torch.uint8, (self.page_tokens, self.head_dim // self.block))
        if self.scaling is Scaling.POWER:
            return (*codes, blocks)
        return (*codes, blocks, Plane(f"{name}_gain", torch.float32, (1,)))
