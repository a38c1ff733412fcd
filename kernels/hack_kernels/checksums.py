"""Checksums of bytes in tensors, computed on the host. `Backend.xxh3_64` gives the same on every device."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from torch import Tensor


def xxh3_64(pieces: Sequence[Tensor], seed: int) -> list[int]:
    """XXH3-64 of each piece, uint8 [bytes]. A piece on another device is copied to the host first."""
    return [xxhash.xxh3_64_intdigest(piece.cpu().numpy().data, seed) for piece in pieces]
