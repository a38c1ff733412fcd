"""The page format of HACK: K and V as 2-, 4- or 8-bit codes with a FP16 minimum and scale per partition (Eq. 4).

Z is `k_partition`, G = D / Z the partitions of a K row. A partition's elements share a FP16 minimum m and scale s:
x^ = s·code + m. Planes in wire order, the contract of `install` and `export` (kernels may keep them in another order):

=========  =====================  =======  ===========================================================
plane      shape                  dtype    meaning
=========  =====================  =======  ===========================================================
k_codes    [Π·k_bits/8, D]        uint8    byte (r, d): rows f·r .. f·r+f-1 of channel d, f = 8/k_bits
k_min      [Π, G]                 float16  per row and partition of head_dim, rounded down
k_scale    [Π, G]                 float16  rounded up
v_codes    [D, Π·v_bits/8]        uint8    byte (d, r): rows f·r .. f·r+f-1 of channel d, f = 8/v_bits
v_min      [D]                    float16  per channel: a V partition is the page
v_scale    [D]                    float16
k_sums     [Π, G]                 sum      Σ codes of the partition (only with `sums`)
v_sums     [D]                    sum      Σ codes of the partition (only with `sums`)
=========  =====================  =======  ===========================================================

Bit order: the earliest row sits in the lowest bits. `sum` is uint8 where the largest sum fits, else int16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane, Pool, Spans
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS

PAGE_TOKENS: Final = (32, 64, 128)
HEAD_DIMS: Final = (64, 96, 128, 256)
CODE_BITS: Final = (2, 4, 8)
SUM_PLANES: Final = ("k_sums", "v_sums")


class Rounding(StrEnum):
    """How codes are rounded."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Arithmetic(StrEnum):
    """How Q and P are quantized to 8 bits.

    SYMMETRIC: q' in -127..127 and p' in 0..127, zero point 0. The terms of Eq. (4) with Σk' and Σv' vanish, so pages
    carry no sums. ASYMMETRIC: the paper's form. Q and P each have 256 levels and a minimum, and pages carry sums.
    """

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class OpenPage(StrEnum):
    """What a query sees of its own page.

    EXACT: FP16 K and V (the open-page rule). K_CODES: K as codes (quantized immediately, as in the paper), V in FP16.
    REQUANTIZE: codes for both; V's codes are dequantized and quantized again with every new row (ablation HACK/RQE).
    """

    EXACT = "exact"
    K_CODES = "k_codes"
    REQUANTIZE = "requantize"


@dataclass(frozen=True)
class HackFormat(PageFormat):
    """Everything that fixes the bytes of a page and the arithmetic on it. Raises `ValueError` naming a bad setting."""

    head_dim: int
    page_tokens: int = DEFAULT_PAGE_TOKENS
    k_bits: int = 2
    v_bits: int = 2
    rounding: Rounding = Rounding.NEAREST
    arithmetic: Arithmetic = Arithmetic.SYMMETRIC
    stored_sums: bool = True
    """Keep Σ codes beside the codes (summation elimination); False recomputes them at every use (ablation HACK/SE).
    Without effect in the symmetric form, which needs no sums."""
    open_page: OpenPage = OpenPage.EXACT
    seed: int = 0
    """Deployment seed of stochastic rounding; equal on every node."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("page_tokens", self.page_tokens, PAGE_TOKENS),
            ("k_bits", self.k_bits, CODE_BITS),
            ("v_bits", self.v_bits, CODE_BITS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value}; it must be one of {', '.join(map(str, allowed))}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must fit 64 unsigned bits")

    @cached_property
    def k_partition(self) -> int:
        """Z: the largest multiple of 32 that divides head_dim and does not exceed page_tokens."""
        return max(z for z in range(32, self.page_tokens + 1, 32) if self.head_dim % z == 0)

    @property
    def k_groups(self) -> int:
        """G: partitions per K row."""
        return self.head_dim // self.k_partition

    @property
    def sums(self) -> bool:
        """Whether pages at rest carry sums."""
        return self.arithmetic is Arithmetic.ASYMMETRIC and self.stored_sums

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """As in the table above."""
        pi, d, g = self.page_tokens, self.head_dim, self.k_groups
        f16, codes = torch.float16, torch.uint8
        planes = (
            Plane("k_codes", codes, (pi * self.k_bits // 8, d)),
            Plane("k_min", f16, (pi, g)),
            Plane("k_scale", f16, (pi, g)),
            Plane("v_codes", codes, (d, pi * self.v_bits // 8)),
            Plane("v_min", f16, (d,)),
            Plane("v_scale", f16, (d,)),
        )
        if not self.sums:
            return planes
        k_sum, v_sum = sum_dtype(self.k_bits, self.k_partition), sum_dtype(self.v_bits, pi)
        return (*planes, Plane("k_sums", k_sum, (pi, g), derived=True), Plane("v_sums", v_sum, (d,), derived=True))


def sum_dtype(bits: int, partition: int) -> torch.dtype:
    """Smallest type that holds the sum of a partition of codes."""
    return torch.uint8 if (2**bits - 1) * partition <= 255 else torch.int16


class HackKernels(PageKernels, Protocol):
    """Kernels for one `HackFormat`."""

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Ablation HACK/RQE: append a batch's rows, k, v [T, Hkv, D] FP16, to the codes of the pages they belong to.

        Each K row is quantized by itself. If a page holds rows already, its V is dequantized to FP16, extended with the
        new rows and quantized again, with all rows of a channel as one partition. Codes past the last row are 0.
        `spans.slots` is not read.
        """
        ...
