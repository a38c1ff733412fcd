"""The page format of levels: K and V as integer codes around zero with one FP16 scale per row; no minimum is stored.

A code c of b bits stands for the level c - z with z = (2^b - 1) / 2, and x^ = s · (c - z). So
q·k^ = s_t s_q (Σ q'c - z Σ q'), one correction per query and none per key, and Σ p_t v^_t = Σ w_t (c_t - z) with the
scale folded into the weight, w_t = p_t s_t (KIVI's axis for V). Levels around zero fit rows that were rotated
(`hackkv.codecs.rotated`), whose channels look alike. Planes in wire order, the contract of `install` and `export`:

=========  =====================  =======  =============================================================
plane      shape                  dtype    meaning
=========  =====================  =======  =============================================================
k_codes    [Π·b/8, D]             uint8    byte (r, d): rows f·r .. f·r+f-1 of channel d, f = 8/b
k_high     [Π/8, D]               uint8    only with 3 bits: the codes' highest bit; k_codes has the lower 2
k_scale    [Π]                    float16
v_codes    [D, Π·b/8]             uint8    byte (d, r): rows f·r .. f·r+f-1 of channel d
v_high     [D, Π/8]               uint8    only with 3 bits
v_scale    [Π]                    float16
=========  =====================  =======  =============================================================

Bit order: the earliest row sits in the lowest bits.

Quantizing a row x [D], in FP32. Every sum below runs over the channels in order, 0 first, one addition at a time and
without fused multiply-adds, so that all implementations give the same bytes.

1. s = sqrt(Σ x_d² / D) · STEP[b]; FITS times: l_d = level(x_d · (1/s)), s = Σ l_d x_d / Σ l_d². Each s is at least
   TINY.
2. s is rounded to FP16, to nearest even, and is at least TINY and at most 65504.
3. y_d = x_d · (1/s). Without feedback l_d = level(y_d). With feedback gains g [D, D] (K only): t = y; for d = D-1 .. 0:
   l_d = level(t_d), and for every i < d: t_i = t_i + (y_d - l_d) · g_id.

level(t) = min(max(floor(t) + 1/2, -z), z), and the code is level + z. Feedback moves the error of a channel to the
channels before it, where the queries that come feel it least (LDLQ of QuIP, arXiv 2307.13304, on rows of K).

Attention is the symmetric form of HACK with one partition: q in -127..127 per row, and the weights of a page in 0..127
relative to the page's largest p_t s_t. The sum of the softmax is that of the p_t, which are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane

PAGE_TOKENS: Final = (32, 64, 128)
HEAD_DIMS: Final = (64, 96, 128, 256)
LEVEL_BITS: Final = (2, 3, 4, 8)
STEP: Final = {2: 0.9957, 3: 0.586, 4: 0.3352, 8: 0.031}
"""Distance of levels that loses least of a normal variable of variance 1, by bits."""
FITS: Final = 3
TINY: Final = 2.0**-24
"""The smallest positive FP16 value."""


@dataclass(frozen=True)
class LevelFormat(PageFormat):
    """Everything that fixes the bytes of a page, but the feedback. Raises `ValueError` naming a bad setting."""

    head_dim: int
    page_tokens: int = 64
    k_bits: int = 4
    v_bits: int = 4

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("head_dim", self.head_dim, HEAD_DIMS),
            ("page_tokens", self.page_tokens, PAGE_TOKENS),
            ("k_bits", self.k_bits, LEVEL_BITS),
            ("v_bits", self.v_bits, LEVEL_BITS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value}; it must be one of {', '.join(map(str, allowed))}")

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """As in the table above."""
        pi, d = self.page_tokens, self.head_dim
        planes: list[Plane] = []
        for name, bits in (("k", self.k_bits), ("v", self.v_bits)):
            for plane, width in code_planes(name, bits):
                shape = (pi * width // 8, d) if name == "k" else (d, pi * width // 8)
                planes.append(Plane(plane, torch.uint8, shape))
            planes.append(Plane(f"{name}_scale", torch.float16, (pi,)))
        return tuple(planes)


def code_planes(name: str, bits: int) -> tuple[tuple[str, int], ...]:
    """The planes that hold codes of K ("k") or V ("v"), lowest bits first, and the bits of each: 3 are 2 and 1."""
    return ((f"{name}_codes", 2), (f"{name}_high", 1)) if bits == 3 else ((f"{name}_codes", bits),)


class LevelKernels(PageKernels, Protocol):
    """Kernels for one `LevelFormat`."""

    def set_feedback(self, layer: int, gains: Tensor) -> None:
        """Seal K of `layer` with these gains from now on: [heads of the model, D, D] float32, zero where i >= d."""
        ...
