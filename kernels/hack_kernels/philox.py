"""Philox4x32-10 (Salmon et al., SC'11) in plain torch: the randomness of stochastic rounding.

A counter-based generator has no state: the number for an element is a function of the deployment seed and of the
element's coordinates, so every node, backend, chunking and replay rounds it alike. A block of four 32-bit words serves
channels 8b .. 8b+7 of one row. Its counter is (layer, KV head, row number, 2b for K and 2b + 1 for V). Its key is the
two halves of the seed. Channel 8b + i takes u, the i-th 16 bits of the block (the lower half of a word before its upper
half), and gets the number (u + 1/2) / 2^16. These numbers are centred in their intervals: a value is rounded up with
its exact probability to within 2^-17, and a value that lies on a level stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

_MULTIPLIER_A: Final = 0xD2511F53
_MULTIPLIER_B: Final = 0xCD9E8D57
_WEYL_A: Final = 0x9E3779B9
_WEYL_B: Final = 0xBB67AE85
_MASK: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_BLOCK: Final = 8
"""Channels that a block serves."""


class Tensors(IntEnum):
    """The tensor whose rows a block rounds."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The coordinates of rows of some KV heads in the model's KV cache; they key stochastic rounding."""

    layer: int
    head_start: int
    """The model's number of the first KV head."""
    rows: Tensor
    """[n] int64: the numbers of the rows in their sequence."""


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter, as int64 tensors; the counter's words are int64 in 0..2^32-1 and broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        hi_a, lo_a = _multiply(c0, _MULTIPLIER_A)
        hi_b, lo_b = _multiply(c2, _MULTIPLIER_B)
        c0, c1, c2, c3 = hi_b ^ c1 ^ k0, lo_b, hi_a ^ c3 ^ k1, lo_a
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, where: Coordinates, heads: int, channels: int, tensor: Tensors) -> Tensor:
    """Uniform numbers in (0, 1), FP32 [n rows, heads, channels]; channels come in eights."""
    device = where.rows.device
    counter = (
        torch.tensor(where.layer, device=device),
        where.head_start + torch.arange(heads, device=device)[None, :, None],
        where.rows[:, None, None],
        2 * torch.arange(channels // _BLOCK, device=device)[None, None, :] + tensor,
    )
    words = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-3)
    return (halves.to(torch.float32) + 0.5) * 2.0**-16


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, in signed int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
