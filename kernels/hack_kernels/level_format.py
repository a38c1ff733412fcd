"""The page format of levels: K and V as integer codes around zero with one scale per row; no minimum is stored.

A code c of b bits stands for the level c - z with z = (2^b - 1) / 2, and x^ = s · (c - z). So
q·k^ = s_t s_q (Σ q'c - z Σ q'), with one correction per query and none per key. Σ p_t v^_t = Σ w_t (c_t - z), with the
scale folded into the weight, w_t = p_t s_t (KIVI's axis for V). Levels around zero fit rows that were rotated
(`hackkv.codecs.rotated`), whose channels look alike. Planes in wire order, the contract of `install` and `export`:

=========  =====================  =======  =============================================================
plane      shape                  dtype    meaning
=========  =====================  =======  =============================================================
k_codes    [Π·b/8, D]             uint8    byte (r, d): rows f·r .. f·r+f-1 of channel d, f = 8/b
k_high     [Π/8, D]               uint8    only with 3 bits: the codes' highest bit; k_codes has the lower 2
k_scale    [Π]                    float16  or uint8, with `Scales.FP8`
v_codes    [D, Π·b/8]             uint8    byte (d, r): rows f·r .. f·r+f-1 of channel d
v_high     [D, Π/8]               uint8    only with 3 bits
v_scale    [Π]                    float16  as k_scale
=========  =====================  =======  =============================================================

Bit order: the earliest row sits in the lowest bits. A byte of scale stands for the FP16 number whose bits are 2^7 times
the byte: no sign, five bits of exponent, three of mantissa (UE5M3). It has the range of FP16. So scales need no common
factor for a page, as scales in E4M3 would, and a row's bytes follow from the row alone.

Quantizing a row x [D], in FP32. Sums over channels have the order given here, one addition at a time. Where no order is
given, every partial sum is exact. Operations are rounded one by one. A product of FP16 values, levels and gains is
exact, so a fused multiply-add gives the same.

1. s = sqrt(Σ x_d² / D) · STEP[b]; FITS times: l_d = level(x_d · (1/s)), s = Σ l_d x_d / Σ l_d². Each s is at least
   TINY, and channel 0 comes first.
2. With feedback s is multiplied by STRETCH[b]. Then s is rounded to FP16, to nearest even, and is at least TINY and at
   most 65504. With `Scales.FP8` the bits of this FP16 number are rounded to a multiple of 2^7, to nearest even, and are
   at least 2^7 (2^-17) and at most 247 · 2^7 (61440).
3. Without feedback l_d = level(x_d · (1/s)).

Feedback (K only) chooses codes whose error e = x/s - l is small in a metric M = Gᵀ diag(w) G that weighs directions by
their effect on future queries: eᵀ M e = Σ w_d (Ge)_d². G [D, D] has 1 on its diagonal and the gains above it; w > 0.
From the last channel to the first, l_d makes up for the errors of the channels after it (LDLQ of QuIP, arXiv
2307.13304). The errors themselves are never computed: b = Gx and sums of levels hold the same information, and make
refits nearly free. Channel D-1 comes first in every sum that rounds. Instead of step 3:

4. b_d = Σ g_di x_i over i = D-1 .. d.
5. For d = D-1 .. 0: h_d = Σ g_di l_i over i > d, l_d = level(b_d · (1/s) - h_d), a_d = h_d + l_d, which is (Gl)_d.
6. REFITS times: s = Σ (w_d a_d) b_d / Σ (w_d a_d) a_d, the scale with the least error of these levels in the metric. It
   is rounded as in step 2, and step 5 follows again.

level(t) = min(max(floor(t) + 1/2, -z), z), and the code is level + z. Gains are multiples of GAIN_STEP, less than
MAX_GAIN in size, and the gains of a channel sum to at most MAX_GAINS in size. So sums of levels stay below 2^24 of
their smallest units.

Attention is the symmetric form of HACK with one partition: q in -127..127 per row, and the weights of a page in 0..127
relative to the page's largest p_t s_t. The denominator of the softmax is the sum of the p_t, which are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane
from hack_kernels.defaults import DEFAULT_PAGE_TOKENS
from hack_kernels.window import OWN_PAGE_ONLY, Window

PAGE_TOKENS: Final = (32, 64, 128)
HEAD_DIMS: Final = (32, 48, 64, 80, 96, 128, 256)
LEVEL_BITS: Final = (2, 3, 4, 8)
STEP: Final = {2: 0.9957, 3: 0.586, 4: 0.3352, 8: 0.031}
"""Distance of levels with the least error for a normal variable of variance 1, by bits."""
FITS: Final = 3
STRETCH: Final = {2: 1.1, 3: 1.0, 4: 1.0, 8: 1.0}
"""The factor of a row's scale under feedback, by bits. With two bits values to round spread more than the row does,
because they carry the errors of other channels."""
REFITS: Final = 1
"""Refits of the scale under feedback. Four would lose 2% less with K at 2 bits (lab/frontier), but each refit reads all
gains again."""
TINY: Final = 2.0**-24
"""The smallest positive FP16 value."""
BYTE_SHIFT: Final = 7
"""The shift from a byte of scale to the bits of FP16."""
LEAST_BYTE: Final = 1
MOST_BYTE: Final = 247
"""The largest byte that stands for a finite FP16 number."""
GAIN_STEP: Final = 2.0**-10
MAX_GAIN: Final = 8.0
MAX_GAINS: Final = 63.0


class Scales(StrEnum):
    """How the scale of a row rests."""

    FP16 = "fp16"
    FP8 = "fp8"
    """A byte, UE5M3."""


@dataclass(frozen=True)
class LevelFormat(PageFormat):
    """Everything that fixes the bytes of a page, except the feedback. Raises `ValueError` naming a bad setting."""

    head_dim: int
    page_tokens: int = DEFAULT_PAGE_TOKENS
    k_bits: int = 4
    v_bits: int = 4
    window: Window = OWN_PAGE_ONLY
    scales: Scales = Scales.FP16

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
        scale = torch.uint8 if self.scales is Scales.FP8 else torch.float16
        planes: list[Plane] = []
        for name, bits in (("k", self.k_bits), ("v", self.v_bits)):
            for plane, width in code_planes(name, bits):
                shape = (pi * width // 8, d) if name == "k" else (d, pi * width // 8)
                planes.append(Plane(plane, torch.uint8, shape))
            planes.append(Plane(f"{name}_scale", scale, (pi,)))
        return tuple(planes)


def code_planes(name: str, bits: int) -> tuple[tuple[str, int], ...]:
    """The planes of codes of K ("k") or V ("v"), lowest bits first, and the bits of each: 3 bits are 2 and 1."""
    return ((f"{name}_codes", 2), (f"{name}_high", 1)) if bits == 3 else ((f"{name}_codes", bits),)


@dataclass(frozen=True, eq=False)
class Feedback:
    """G and w of the KV heads of the model, float32."""

    gains: Tensor
    """[heads, D, D]: entry [d, i] is the gain by which the level of channel i acts on channel d. 0 unless i > d."""
    weights: Tensor
    """[heads, D]. Only the ratios within a head matter."""

    def heads(self, start: int, count: int) -> Feedback:
        """The feedback of KV heads [start, start + count)."""
        return Feedback(self.gains[start : start + count], self.weights[start : start + count])

    def to(self, device: torch.device) -> Feedback:
        """A copy on another device."""
        return Feedback(self.gains.to(device), self.weights.to(device))

    def check(self, head_dim: int) -> None:
        """Raises `ValueError` naming the tensor that does not fit the format."""
        heads = self.weights.shape[0]
        for name, x, shape in (
            ("gains", self.gains, (heads, head_dim, head_dim)),
            ("weights", self.weights, (heads, head_dim)),
        ):
            if tuple(x.shape) != shape or x.dtype is not torch.float32:
                raise ValueError(f"{name}: {list(x.shape)} {x.dtype}; expected {list(shape)} torch.float32")
        if bool(self.gains.tril().any()):
            raise ValueError("gains: a value on or below the diagonal is not 0")
        if not torch.equal(self.gains, on_grid(self.gains)):
            raise ValueError(
                f"gains: a value is no multiple of {GAIN_STEP:g} below {MAX_GAIN:g}, "
                f"or those of a channel are more than {MAX_GAINS:g} together"
            )
        if not bool(((self.weights > 0) & self.weights.isfinite()).all()):
            raise ValueError("weights: a value is not positive and finite")


def on_grid(gains: Tensor) -> Tensor:
    """Gains [..., D, D] that a `Feedback` takes: nearest to these and no larger in size."""
    total = gains.abs().sum(-1, keepdim=True)
    smaller = torch.where(total > MAX_GAINS, gains * ((MAX_GAINS - 1) / total), gains)
    return (smaller / GAIN_STEP).trunc().mul(GAIN_STEP).clamp(GAIN_STEP - MAX_GAIN, MAX_GAIN - GAIN_STEP)


class LevelKernels(PageKernels, Protocol):
    """Kernels for one `LevelFormat`."""

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        """Seal K of `layer` with this feedback from now on."""
        ...
