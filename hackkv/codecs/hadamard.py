"""Orthonormal Hadamard matrices: rotations after which the channels of a row look alike."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_PRIME: Final = 11


def hadamard(order: int) -> Tensor:
    """[order, order] float64, orthonormal: Sylvester's for powers of two, for 12 times those Paley's beside it.

    Raises `ValueError` for any other order.
    """
    base = torch.ones(1, 1, dtype=torch.float64)
    if order % (_PRIME + 1) == 0:
        base = _paley()
    size = base.shape[0]
    if order <= 0 or order % size or (order // size).bit_count() != 1:
        raise ValueError(f"no Hadamard matrix of order {order} is made here: a power of two, or 12 times one")
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while base.shape[0] < order:
        base = torch.kron(two, base)
    return base.mul_(order**-0.5)


def _paley() -> Tensor:
    """Order 12, not normalized: 1 + S, where S is skew and holds the quadratic residues modulo 11."""
    squares = {i * i % _PRIME for i in range(1, _PRIME)}
    matrix = torch.eye(_PRIME + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    for i in range(_PRIME):
        for j in range(_PRIME):
            if i != j:
                matrix[i + 1, j + 1] = 1 if (i - j) % _PRIME in squares else -1
    return matrix
