"""Partitions to codes and back, and codes to bytes and back: the definitions that every backend must meet bit for bit.

For a partition x with levels = 2^bits - 1:
m = min(x) rounded to FP16 toward -inf, with +0 in place of -0;
s = (max(x) - m) / levels rounded to FP16 toward +inf, with 1 in place of 0;
code = floor((x - m) / s + r), clamped to 0..levels, with r = 1/2 (nearest) or uniform in (0, 1) (stochastic; see
`philox.py`). All arithmetic is IEEE FP32 with true division, so |x - (s·code + m)| <= s (s/2 for nearest) and constants
are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hack_kernels.hack_format import HackFormat, Rounding
from hack_kernels.philox import Coordinates, Tensors, uniform


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes uint8 [..., n] of partitions along the last axis, with FP16 minimum and scale [...]."""

    codes: Tensor
    minimum: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """x^ = s·code + m. Serves tests, the RQE ablation and evaluation; attention never calls it."""
        codes, scale, minimum = (t.to(dtype) for t in (self.codes, self.scale, self.minimum))
        return codes * scale[..., None] + minimum[..., None]

    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, minimum, scale."""
        return self.codes, self.minimum, self.scale


def quantize(x: Tensor, bits: int, noise: Tensor | None = None) -> Quantized:
    """Quantize partitions that lie along the last axis; `noise` in [0, 1), shaped as x, rounds stochastically."""
    levels = 2**bits - 1
    x = x.to(torch.float32)
    minimum = fp16_down(x.amin(-1) + 0.0)
    low = minimum.to(torch.float32)
    scale = fp16_up((x.amax(-1) - low) / levels)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    steps = (x - low[..., None]) / scale.to(torch.float32)[..., None]
    codes = torch.floor(steps + (0.5 if noise is None else noise)).clamp_(0, levels)
    return Quantized(codes.to(torch.uint8), minimum, scale)


def quantize_k(fmt: HackFormat, where: Coordinates, k: Tensor) -> Quantized:
    """K rows [n, Hkv, D] at `where` -> codes [n, Hkv, G, Z], metadata [n, Hkv, G]; each row by itself."""
    n, heads, dim = k.shape
    split = (n, heads, fmt.k_groups, fmt.k_partition)
    noise = None
    if fmt.rounding is Rounding.STOCHASTIC:
        noise = uniform(fmt.seed, where, heads, dim, Tensors.K).view(split)
    return quantize(k.reshape(split), fmt.k_bits, noise)


def quantize_v(fmt: HackFormat, where: Coordinates, v: Tensor) -> Quantized:
    """V rows [n, Hkv, D] of one page -> codes [Hkv, D, n], metadata [Hkv, D]; a channel's rows are one partition."""
    heads, dim = v.shape[1:]
    noise = None
    if fmt.rounding is Rounding.STOCHASTIC:
        noise = uniform(fmt.seed, where, heads, dim, Tensors.V).permute(1, 2, 0)
    return quantize(v.permute(1, 2, 0), fmt.v_bits, noise)


def pack(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes uint8 -> bytes along `axis`: byte r holds elements f·r .. f·r+f-1, the first in the lowest bits."""
    per_byte = 8 // bits
    codes = codes.movedim(axis, -1)
    fields = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = torch.zeros(fields.shape[:-1], dtype=torch.uint8, device=codes.device)
    for i in range(per_byte):
        packed |= fields[..., i] << (bits * i)
    return packed.movedim(-1, axis).contiguous()


def unpack(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Inverse of `pack`."""
    mask = 2**bits - 1
    packed = packed.movedim(axis, -1)
    fields = torch.stack([(packed >> (bits * i)) & mask for i in range(8 // bits)], dim=-1)
    return fields.flatten(-2).movedim(-1, axis)


def fp16_down(x: Tensor) -> Tensor:
    """Largest FP16 not above x (FP32, finite)."""
    half = x.to(torch.float16)
    return torch.where(half.to(torch.float32) > x, _next_fp16(half, up=False), half)


def fp16_up(x: Tensor) -> Tensor:
    """Smallest FP16 not below x (FP32, finite); +inf beyond 65504."""
    half = x.to(torch.float16)
    return torch.where(half.to(torch.float32) < x, _next_fp16(half, up=True), half)


def _next_fp16(half: Tensor, *, up: bool) -> Tensor:
    """The neighbouring FP16 value: one step on the bit pattern (torch has no FP16 `nextafter` on the CPU)."""
    bits = half.view(torch.int16)
    away_from_zero = (half > 0) if up else (half < 0)
    stepped = torch.where(away_from_zero, bits + 1, bits - 1)
    smallest = torch.full_like(bits, 0x0001 if up else -0x7FFF)
    return torch.where(half == 0, smallest, stepped).view(torch.float16)
