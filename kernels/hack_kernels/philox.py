"""Philox4x32-10 (Salmon et al., SC'11) in plain torch: the randomness of stochastic rounding.

A counter-based generator has no state: the number for an element is a function of the deployment seed and of the
element's coordinates, so every node, backend, chunking and replay rounds it alike. Counter: (layer, KV head, token
position, channel); key: the two halves of the seed. Word 0 of the result rounds K, word 1 rounds V.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MULTIPLIER_A: Final = 0xD2511F53
_MULTIPLIER_B: Final = 0xCD9E8D57
_WEYL_A: Final = 0x9E3779B9
_WEYL_B: Final = 0xBB67AE85
_MASK: Final = 0xFFFFFFFF
_ROUNDS: Final = 10


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


def uniform(seed: int, layer: int, heads: int, positions: Tensor, channels: int, word: int) -> Tensor:
    """Uniform numbers in [0, 1) with 24 bits, FP32 [len(positions), heads, channels]. `positions` is int64."""
    device = positions.device
    counter = (
        torch.tensor(layer, device=device),
        torch.arange(heads, device=device)[None, :, None],
        positions[:, None, None],
        torch.arange(channels, device=device)[None, None, :],
    )
    words = philox4x32(counter, (seed & _MASK, seed >> 32))
    return (words[word] >> 8).to(torch.float32) * 2.0**-24


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, in signed int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
