"""Eq. (4) of the paper on packed codes, never dequantized.

For partitions A = s_a·a' + m_a and B = s_b·b' + m_b of Z elements:
Σ A·B = s_a s_b Σa'b' + m_b s_a Σa' + m_a s_b Σb' + Z m_a m_b.

Σa'b' is an integer dot product, computed by FP32 matrix products on integer values: every partial sum is an integer
below 2^24 (at most 255·255·128), which FP32 holds exactly, in any order of summation. Partitions accumulate in FP32.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.hack_format import Arithmetic, HackFormat, sum_dtype
from hack_kernels.quantize import unpack

Q_LEVELS_SYMMETRIC = 127
P_LEVELS_SYMMETRIC = 127
LEVELS_ASYMMETRIC = 255
INT8_OFFSET = 128  # asymmetric q' is kept as signed INT8 with a shifted minimum: far less cancellation in FP32


class KCodes(NamedTuple):
    """K of n rows, unpacked to FP32 integers, with its metadata in FP32."""

    codes: Tensor  # [Hkv, G, n, Z]
    minimum: Tensor  # [Hkv, G, n]
    scale: Tensor  # [Hkv, G, n]
    sums: Tensor | None  # [Hkv, G, n], None in the symmetric form

    def first(self, rows: int) -> KCodes:
        """The leading rows only."""
        sums = None if self.sums is None else self.sums[..., :rows]
        return KCodes(self.codes[:, :, :rows], self.minimum[..., :rows], self.scale[..., :rows], sums)


class VCodes(NamedTuple):
    """V of P pages, unpacked to FP32 integers, with its metadata in FP32."""

    codes: Tensor  # [Hkv, P, Π, D]
    minimum: Tensor  # [Hkv, P, D]
    scale: Tensor  # [Hkv, P, D]
    sums: Tensor | None  # [Hkv, P, D], None in the symmetric form

    def first(self, pages: int) -> VCodes:
        """The leading pages only."""
        sums = None if self.sums is None else self.sums[:, :pages]
        return VCodes(self.codes[:, :pages], self.minimum[:, :pages], self.scale[:, :pages], sums)


class Query(NamedTuple):
    """Q in 8 bits per (row, head, partition of head_dim), values FP32."""

    codes: Tensor  # [Hkv, G, R, Z]
    scale: Tensor  # [Hkv, G, R]
    minimum: Tensor | None  # [Hkv, G, R], None in the symmetric form
    sums: Tensor  # [Hkv, G, R]


class CodeArithmetic:
    """Products on the codes of one format. `approximation_s` grows by the seconds spent on the terms beside Σa'b'."""

    def __init__(self, fmt: HackFormat) -> None:
        self.fmt = fmt
        self.approximation_s = 0.0

    def unpack(self, held: Planes) -> tuple[KCodes, VCodes]:
        """A sequence's sealed pages, planes [P, Hkv, ...] in wire order, as integers."""
        fmt = self.fmt
        k = unpack(held["k_codes"], fmt.k_bits, axis=-2).unflatten(-1, (fmt.k_groups, fmt.k_partition))
        v = unpack(held["v_codes"], fmt.v_bits, axis=-1)
        if fmt.arithmetic is Arithmetic.ASYMMETRIC and not fmt.stored_sums:
            began = perf_counter()
            held = held | count_sums(fmt, held)
            self.approximation_s += perf_counter() - began

        def k_meta(plane: Tensor) -> Tensor:
            return plane.float().permute(1, 3, 0, 2).flatten(2)  # [P, Hkv, Π, G] -> [Hkv, G, P·Π]

        def v_meta(plane: Tensor) -> Tensor:
            return plane.float().transpose(0, 1)

        sums = fmt.arithmetic is Arithmetic.ASYMMETRIC
        k_codes = k.float().permute(1, 3, 0, 2, 4).flatten(2, 3)
        k_sums, v_sums = (k_meta(held["k_sums"]), v_meta(held["v_sums"])) if sums else (None, None)
        return (
            KCodes(k_codes, k_meta(held["k_min"]), k_meta(held["k_scale"]), k_sums),
            VCodes(v.float().permute(1, 0, 3, 2), v_meta(held["v_min"]), v_meta(held["v_scale"]), v_sums),
        )

    def scores(self, query: Query, k: KCodes) -> Tensor:
        """Eq. (4) for Q·K^T: [Hkv, R, n] FP32, summed over the partitions of head_dim."""
        dots = query.codes @ k.codes.transpose(-1, -2)  # [Hkv, G, R, n]
        began = perf_counter()
        minimum, scale = k.minimum[:, :, None, :], k.scale[:, :, None, :]
        q_scale = query.scale[..., None]
        scores = q_scale * scale * dots + minimum * q_scale * query.sums[..., None]
        if query.minimum is not None and k.sums is not None:
            q_min = query.minimum[..., None]
            scores = scores + q_min * scale * k.sums[:, :, None, :] + self.fmt.k_partition * q_min * minimum
        self.approximation_s += perf_counter() - began
        return scores.sum(1)

    def weigh_pages(self, p: Tensor, v: VCodes) -> tuple[Tensor, Tensor]:
        """Eq. (4) for P·V per page: p [Hkv, R, P, Π] in 0..1 -> outputs [Hkv, R, P, D], weight sums [Hkv, R, P].

        Weights are summed after rounding, so an output is a convex combination of rows of V^.
        """
        page_tokens = self.fmt.page_tokens
        p_min: Tensor | None = None
        if self.fmt.arithmetic is Arithmetic.SYMMETRIC:
            p_scale = torch.full_like(p[..., 0], 1.0 / P_LEVELS_SYMMETRIC)
            codes = torch.floor(p * P_LEVELS_SYMMETRIC + 0.5)
        else:
            p_min = p.amin(-1)
            p_scale = _nonzero((1.0 - p_min) / LEVELS_ASYMMETRIC)
            codes = torch.floor((p - p_min[..., None]) / p_scale[..., None] + 0.5)
        dots = (codes.transpose(1, 2) @ v.codes).transpose(1, 2)  # [Hkv, R, P, D]
        began = perf_counter()
        sums = codes.sum(-1)
        v_min, v_scale = v.minimum[:, None], v.scale[:, None]
        outputs = p_scale[..., None] * (v_scale * dots + v_min * sums[..., None])
        weights = p_scale * sums
        if p_min is not None and v.sums is not None:
            low = p_min[..., None]
            outputs = outputs + low * v_scale * v.sums[:, None] + page_tokens * low * v_min
            weights = weights + page_tokens * p_min
        self.approximation_s += perf_counter() - began
        return outputs, weights


def quantize_query(fmt: HackFormat, q: Tensor) -> Query:
    """Q [Hkv, R, D] FP32 to 8 bits per (row, head, partition), nearest. Its metadata never travels and stays FP32."""
    q = q.unflatten(-1, (fmt.k_groups, fmt.k_partition)).transpose(1, 2)  # [Hkv, G, R, Z]
    minimum: Tensor | None = None
    if fmt.arithmetic is Arithmetic.SYMMETRIC:
        scale = _nonzero(q.abs().amax(-1) / Q_LEVELS_SYMMETRIC)
        codes = torch.floor(q / scale[..., None] + 0.5).clamp(-Q_LEVELS_SYMMETRIC, Q_LEVELS_SYMMETRIC)
    else:
        minimum = q.amin(-1)
        scale = _nonzero((q.amax(-1) - minimum) / LEVELS_ASYMMETRIC)
        codes = torch.floor((q - minimum[..., None]) / scale[..., None] + 0.5).clamp(0, LEVELS_ASYMMETRIC) - INT8_OFFSET
        minimum = minimum + INT8_OFFSET * scale
    return Query(codes, scale, minimum, codes.sum(-1))


def count_sums(fmt: HackFormat, held: Planes) -> Planes:
    """Σ codes per partition, from packed codes [P, Hkv, ...] in wire order."""
    k = unpack(held["k_codes"], fmt.k_bits, axis=-2).unflatten(-1, (fmt.k_groups, fmt.k_partition))
    v = unpack(held["v_codes"], fmt.v_bits, axis=-1)
    return {
        "k_sums": k.sum(-1, dtype=torch.int32).to(sum_dtype(fmt.k_bits, fmt.k_partition)),
        "v_sums": v.sum(-1, dtype=torch.int32).to(sum_dtype(fmt.v_bits, fmt.page_tokens)),
    }


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)
