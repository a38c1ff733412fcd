"""Checksums of bytes in tensors, as the host makes them: what `Backend.xxh3_64` gives on every device."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from torch import Tensor


def xxh3_64(pieces: Sequence[Tensor], seed: int) -> list[int]:
    """XXH3-64 of each piece, uint8 [bytes], on the host: of a copy, where it lies elsewhere."""
    return [xxhash.xxh3_64_intdigest(piece.cpu().numpy().data, seed) for piece in pieces]
