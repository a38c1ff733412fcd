"""Rotary embedding: the frequencies of every way of stretching the context that we serve.

The formulas, their order of operations and their float32 are those of transformers (`modeling_rope_utils`), so the
frequencies are equal bit for bit. They stand here because importing transformers takes longer than loading a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: channel pair i turns by `position * inv_freq[i]`; cos and sin are multiplied by `scale`."""

    kind: str
    theta: float
    inv_freq: tuple[float, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class RopeSource:
    """The numbers from which the frequencies follow."""

    parameters: Mapping[str, Any]
    """`rope_theta`, and what else the kind asks for, under Hugging Face's names."""
    head_dim: int
    max_positions: int


def plain(theta: float, head_dim: int) -> Tensor:
    """The frequencies without any stretching, float32 [D / 2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _default(source: RopeSource) -> tuple[Tensor, float]:
    return plain(source.parameters["rope_theta"], source.head_dim), 1.0


def _linear(source: RopeSource) -> tuple[Tensor, float]:
    return _default(source)[0] / source.parameters["factor"], 1.0


def _llama3(source: RopeSource) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched, short ones are not, and those between are blended."""
    given = source.parameters
    inverse, _ = _default(source)
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    original = given.get("original_max_position_embeddings", source.max_positions)
    waves = 2 * math.pi / inverse
    stretched = torch.where(waves > original / low, inverse / factor, inverse)
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(waves < original / high) * ~(waves > original / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(source: RopeSource) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): as `_llama3`, by counts of turns; cos and sin grow with the stretch."""
    given, dim, base = source.parameters, source.head_dim, source.parameters["rope_theta"]
    original = given.get("original_max_position_embeddings", source.max_positions)
    factor = given["factor"]
    if factor is None:
        factor = source.max_positions / original

    def channel(turns: float) -> float:
        return (dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = channel(given.get("beta_fast") or 32), channel(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = base ** (torch.arange(0, dim, 2).to(dtype=torch.float) / dim)
    inverse = 1.0 / (factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept
    return inverse, _yarn_scale(given, factor)


def _yarn_scale(given: Mapping[str, Any], factor: float) -> float:
    def growth(scale: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if (stated := given.get("attention_factor")) is not None:
        return float(stated)
    return growth(scale) / growth(all_dim) if scale and all_dim else growth()


KINDS: Final[dict[str, Callable[[RopeSource], tuple[Tensor, float]]]] = {
    "default": _default,
    "linear": _linear,
    # "dynamic" changes its frequencies once a sequence outgrows max_position_embeddings. Keys in the cache are already
    # rotated by then, so we serve it up to that length, where it equals the default.
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
}
"""`rope_type` -> inverse frequencies, float32 [D / 2], and the factor of cos and sin.

Raises KeyError, TypeError, ValueError or ZeroDivisionError for parameters that the kind cannot work with."""


def make_rope(kind: str, source: RopeSource) -> Rope:
    """The rotary embedding of a row of `KINDS`. Raises what the row raises."""
    inverse, scale = KINDS[kind](source)
    return Rope(kind, source.parameters["rope_theta"], tuple(inverse.tolist()), float(scale))
