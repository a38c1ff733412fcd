"""Codes of vectors: points of a lattice instead of one level per channel, at the same bits.

Points are half or quarter integers, so products with looked-up points stay integer products. A point is a pattern of
magnitudes with signs. Half of the sign choices of a pattern belong to the lattice.

python -m lab.frontier.lattice: prints the errors of levels and of points at 2 bits, for rows of normal values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from lab.frontier.quant import FITS, FP16_BYTES, Quantizer, Tok, quotient

CHUNK: Final = 1 << 12
"""Number of vectors that are coded at a time."""


@dataclass(frozen=True, eq=False)
class Lattice:
    """The points nearest the origin: patterns with all signs that make their sum even, each moved by a shift."""

    patterns: Tensor
    """[P, n], of values 1/2, 3/2, 5/2."""
    shifts: tuple[float, ...]

    @property
    def bits(self) -> float:
        """Bits of a code per channel."""
        patterns, n = self.patterns.shape
        return (math.log2(patterns * len(self.shifts)) + n - 1) / n

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest point to each x [N, n]."""
        return torch.cat([self._nearest(part) for part in x.split(CHUNK)])

    def _nearest(self, x: Tensor) -> Tensor:
        points = torch.stack([self._unshifted(x - shift) + shift for shift in self.shifts])
        closest = (x - points).pow(2).sum(-1).argmin(0)
        return points[closest, torch.arange(len(x))]

    def _unshifted(self, x: Tensor) -> Tensor:
        """The nearest point without a shift. Signs are those of x; if their sum is odd, the cheapest sign turns."""
        size = x.abs()
        # A sign changes the sum by twice a half integer, so by an odd number.
        odd = (self.patterns.sum(-1) + (x < 0).sum(-1, keepdim=True)) % 2
        least = torch.full((len(x), len(self.patterns)), torch.inf)
        for channel, magnitudes in zip(size.mT, self.patterns.mT, strict=True):
            torch.minimum(least, channel[:, None] * magnitudes, out=least)
        best = (size @ self.patterns.mT - self.patterns.pow(2).sum(-1) / 2 - 2 * odd * least).argmax(-1)
        point = self.patterns[best] * torch.where(x < 0, -1, 1)
        cheapest = (size * self.patterns[best]).argmin(-1, keepdim=True)
        turned = 1 - 2 * odd.gather(1, best[:, None])
        return point.scatter(1, cheapest, point.gather(1, cheapest) * turned)


@cache
def d4() -> Lattice:
    """D4 by half integers: 32 patterns of 8 points, 2 bits a channel."""
    return Lattice(_least_patterns(4, 32), (0.0,))


@cache
def e8() -> Lattice:
    """E8 as QuIP# packs it (arXiv:2402.04396): 256 patterns of 128 points, and a shift by a quarter; 2 bits a channel.

    If more patterns of one norm exist than fit, the first ones stay, not those that QuIP# chose.
    """
    return Lattice(_least_patterns(8, 256), (-0.25, 0.25))


def _least_patterns(n: int, count: int) -> Tensor:
    every = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=n)))
    return every[every.pow(2).sum(-1).argsort(stable=True)[:count]]


@cache
def step(lattice: Lattice) -> float:
    """The scale, to 0.02, with which the lattice loses least on normal variables of variance 1."""
    n = lattice.patterns.shape[1]
    x = torch.randn(CHUNK, n, generator=torch.Generator().manual_seed(0))
    losses: dict[float, float] = {
        s: (lattice.nearest(x / s) * s - x).pow(2).mean().item() for s in torch.arange(0.6, 1.4, 0.02).tolist()
    }
    return min(losses, key=losses.__getitem__)


@dataclass(frozen=True)
class Vectors:
    """A `Tok` with points of a lattice in place of levels, n channels at a time."""

    lattice: Lattice
    to: Tensor
    """[layers, Hkv, D, D] or [D, D]"""
    back: Tensor
    mean: Tensor | None = None
    feedback: Tensor | None = None
    """R of `Tok`, [layers, Hkv, D, D]: blocks of n channels make up for the errors of those after them."""
    passes: int = 1

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """See `Quantizer`."""
        to, back = (x[layer] if x.dim() > 2 else x for x in (self.to, self.back))
        mean = 0 if self.mean is None else self.mean[layer][:, None]
        y = (rows - mean) @ to
        r = None if self.feedback is None else self.feedback[layer]
        s = y.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-8) * step(self.lattice)
        for _ in range(self.passes if r is not None else FITS):
            points = self._points(y / s, r)
            s = quotient(points, y) if r is None else quotient(points @ r.mT, y @ r.mT)
            s = s.half().float()
        return (self._points(y / s, r) * s) @ back + mean

    def row_bytes(self, layer: int, dim: int) -> float:
        """See `Quantizer`."""
        return dim * self.lattice.bits / 8 + FP16_BYTES

    def _points(self, y: Tensor, r: Tensor | None) -> Tensor:
        """Points [Hkv, T, D] of y in units of the scale."""
        heads, rows, dim = y.shape
        n = self.lattice.patterns.shape[1]
        if r is None:
            return self.lattice.nearest(y.reshape(-1, n)).view(heads, rows, dim)
        points, errors = torch.zeros_like(y), torch.zeros_like(y)
        for start in reversed(range(0, dim, n)):
            block, after = slice(start, start + n), slice(start + n, dim)
            gain = torch.linalg.solve_triangular(r[:, block, block], r[:, block, after], upper=True)
            wanted = y[..., block] + errors[..., after] @ gain.mT
            points[..., block] = self.lattice.nearest(wanted.reshape(-1, n)).view(heads, rows, n)
            errors[..., block] = y[..., block] - points[..., block]
        return points


def main() -> None:
    """Print the mean squares of the errors."""
    rows, plain = torch.randn(1, 1 << 14, 64, generator=torch.Generator().manual_seed(1)), torch.eye(64)
    tried: dict[str, Quantizer] = {"levels": Tok(2, plain, plain)}
    tried |= {name: Vectors(lattice, plain, plain) for name, lattice in (("D4", d4()), ("E8", e8()))}
    for name, quantize in tried.items():
        print(f"{name:8} {(quantize(0, rows) - rows).pow(2).mean().item():.4f}")


if __name__ == "__main__":
    main()
