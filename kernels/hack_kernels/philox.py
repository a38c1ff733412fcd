"""Philox4x32-10 (Salmon et al., SC'11) in plain torch: the randomness of stochastic rounding.

A counter-based generator has no state: the number for an element is a function of the deployment seed and of the
element's coordinates, so every node, backend, chunking and replay rounds it alike. A block of four 32-bit words serves
the channels 8b .. 8b+7 of one row. Its counter: (layer, KV head, token position, 2b for K and 2b + 1 for V); its key:
the two halves of the seed. Channel 8b + i takes the i-th 16 bits of the block, u, the lower half of a word before its
upper one, and the number (u + 1/2) / 2^16. Being centred in their intervals, these round a value up with its exact
probability to within 2^-17, and leave a value that lies on a level where it is.
"""

from __future__ import annotations

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


class Plane(IntEnum):
    """Whose rows a block rounds."""

    K = 0
    V = 1


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


def uniform(seed: int, layer: int, heads: int, positions: Tensor, channels: int, plane: Plane) -> Tensor:
    """Uniform numbers in (0, 1), FP32 [len(positions), heads, channels]. `positions` is int64; channels in eights."""
    device = positions.device
    counter = (
        torch.tensor(layer, device=device),
        torch.arange(heads, device=device)[None, :, None],
        positions[:, None, None],
        2 * torch.arange(channels // _BLOCK, device=device)[None, None, :] + plane,
    )
    words = torch.stack(philox4x32(counter, (seed & _MASK, seed >> 32)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-3)
    return (halves.to(torch.float32) + 0.5) * 2.0**-16


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, in signed int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
