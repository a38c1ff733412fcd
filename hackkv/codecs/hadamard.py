"""Orthonormal Hadamard matrices: rotations after which the channels of a row look alike."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

PRIMES: Final = (11, 19)
"""Primes of Paley's first construction (J. Math. Phys. 12, 1933): a prime p that is 3 modulo 4 gives order p + 1."""


def hadamard(order: int) -> Tensor:
    """[order, order] float64, orthonormal: Sylvester's for powers of two; for 12 or 20 times one, grown from Paley's.

    Raises `ValueError` for any other order.
    """
    base = torch.ones(1, 1, dtype=torch.float64)
    for prime in PRIMES:
        if order % (prime + 1) == 0 and (order // (prime + 1)).bit_count() == 1:
            base = _paley(prime)
    size = base.shape[0]
    if order <= 0 or order % size or (order // size).bit_count() != 1:
        raise ValueError(f"no Hadamard matrix of order {order} is made here: a power of two, or 12 or 20 times one")
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while base.shape[0] < order:
        base = torch.kron(two, base)
    return base.mul_(order**-0.5)


def _paley(prime: int) -> Tensor:
    """Order prime + 1, not normalized: 1 + S, where S is skew and holds the quadratic residues modulo `prime`."""
    squares = {i * i % prime for i in range(1, prime)}
    matrix = torch.eye(prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    for i in range(prime):
        for j in range(prime):
            if i != j:
                matrix[i + 1, j + 1] = 1 if (i - j) % prime in squares else -1
    return matrix
