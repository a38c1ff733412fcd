"""`mix64`: a checksum of bytes that a processor and a GPU compute alike, whatever order their threads take.

    mix64(data, seed) = len(data) + sum over i of fmix64(word_i ^ i * PHI ^ seed)      mod 2**64

`word_i` are the bytes as little-endian words, the last filled up with zeros, and fmix64 is MurmurHash3's finalizer.
This is the definition, for `csrc/mix64.h` and `triton/mix64.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

PHI: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xFF51AFD7ED558CCD
SECOND: Final = 0xC4CEB9FE1A85EC53


def mix64(data: bytes, seed: int) -> int:
    """The checksum of `data`; `seed` and the result are in 0 .. 2**64 - 1."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    with np.errstate(over="ignore"):
        mixed = words ^ (np.arange(words.size, dtype=np.uint64) * np.uint64(PHI)) ^ np.uint64(seed)
        for factor in (FIRST, SECOND):
            mixed = (mixed ^ mixed >> np.uint64(33)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(33)
        return (len(data) + int(mixed.sum(dtype=np.uint64))) % 2**64
