"""Quantizers of rows: a basis, levels ±1/2, ±3/2, ... times a scale per token, and feedback of errors inside a row.

They are "fake": floats go in, and the floats that an integer kernel would compute with come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from hackkv.codecs import hadamard as exact

PAGE: Final = 64
STEP: Final = {2: 0.9957, 3: 0.586, 4: 0.3352}
"""Bits -> distance of levels that loses least on a normal variable of variance 1."""
FITS: Final = 3
FP16_BYTES: Final = 2


class Quantizer(Protocol):
    """The effect of a format on K or V."""

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """Rows [Hkv, T, D] of a layer after coding and decoding; T is a multiple of the page."""
        ...

    def row_bytes(self, layer: int, dim: int) -> float:
        """Bytes of the codes and scales of a row of one KV head."""
        ...


@dataclass(frozen=True)
class Tok:
    """Rows in a basis, one FP16 scale per token: y = (x - mean) @ to, and x is nearly mean + y' @ back."""

    bits: int | Sequence[int]
    """One number for all layers, or one per layer."""
    to: Tensor
    """[layers, Hkv, D, D] or [D, D]"""
    back: Tensor
    """The inverse of `to`."""
    mean: Tensor | None = None
    """[layers, Hkv, D]"""
    feedback: Tensor | None = None
    """R of H = R^T R, upper triangular, [layers, Hkv, D, D]: codes are chosen to make e^T H e small."""
    passes: int = 4
    """Number of refits of the scale under feedback."""
    stretch: float = 1.0
    """Factor of the scale before the first codes under feedback."""
    fp8_scale: bool = False
    fits: int = FITS
    """Number of least-squares fits of the scale, which start from the row's rms, before feedback."""
    sweeps: int = 0
    """Number of sweeps of coordinate descent after the feedback."""

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """See `Quantizer`."""
        levels, scales = self.codes(layer, rows)
        x = (levels * scales) @ (self.back[layer] if self.back.dim() > 2 else self.back)
        return x if self.mean is None else x + self.mean[layer][:, None]

    def row_bytes(self, layer: int, dim: int) -> float:
        """See `Quantizer`. The FP16 scale per page of `fp8_scale` counts too."""
        return dim * self.bits_of(layer) / 8 + (1 + FP16_BYTES / PAGE if self.fp8_scale else FP16_BYTES)

    def bits_of(self, layer: int) -> int:
        """Bits of a code."""
        return self.bits if isinstance(self.bits, int) else self.bits[layer]

    def codes(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Levels [Hkv, T, D] and scales [Hkv, T, 1]."""
        bits = self.bits_of(layer)
        x = rows if self.mean is None else rows - self.mean[layer][:, None]
        y = x @ (self.to[layer] if self.to.dim() > 2 else self.to)
        s = fit(y, bits, self.fits)
        if self.feedback is None:
            s = self._stored(s)
            return nearest(y / s, bits), s
        s = self._stored(s * self.stretch)
        r = self.feedback[layer]
        for _ in range(self.passes):
            felt, wanted = spread(y, s, r, bits) @ r.mT, y @ r.mT
            s = self._stored(quotient(felt, wanted))
        levels = spread(y, s, r, bits)
        return (descend(y / s, levels, r, bits, self.sweeps) if self.sweeps else levels), s

    def _stored(self, s: Tensor) -> Tensor:
        return fp8(s) if self.fp8_scale else s.half().float()


@dataclass(frozen=True)
class Components:
    """The first principal components of rows in 8 bits; the rest as a `Tok` of a covariance without them."""

    directions: Tensor
    """[layers, Hkv, D, r], orthonormal."""
    mean: Tensor
    """[layers, Hkv, D]"""
    rest: Tok

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """See `Quantizer`."""
        u, mean = self.directions[layer], self.mean[layer][:, None]
        parts = (rows - mean) @ u
        scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-8).half().float()
        rest = rows - parts @ u.mT
        return self.rest(layer, rest) + ((parts / scale).round().clamp(-127, 127) * scale) @ u.mT

    def row_bytes(self, layer: int, dim: int) -> float:
        """See `Quantizer`."""
        return self.rest.row_bytes(layer, dim) + self.directions.shape[-1] + FP16_BYTES


@dataclass(frozen=True)
class Channel:
    """KIVI's axis for K: minimum and scale per channel and page."""

    bits: int

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """See `Quantizer`."""
        pages = rows.unflatten(1, (-1, PAGE))
        low, high = pages.amin(2, keepdim=True).half().float(), pages.amax(2, keepdim=True)
        s = ((high - low) / (2**self.bits - 1)).half().float().clamp_min(1e-6)
        codes = ((pages - low) / s).round().clamp(0, 2**self.bits - 1)
        return torch.flatten(codes * s + low, 1, 2)

    def row_bytes(self, layer: int, dim: int) -> float:
        """See `Quantizer`."""
        return dim * self.bits / 8 + 2 * FP16_BYTES * dim / PAGE


@dataclass(frozen=True)
class OnLayers:
    """A quantizer on some layers; rows of the others stay FP16."""

    inner: Quantizer
    layers: range

    def __call__(self, layer: int, rows: Tensor) -> Tensor:
        """See `Quantizer`."""
        return self.inner(layer, rows) if layer in self.layers else rows

    def row_bytes(self, layer: int, dim: int) -> float:
        """See `Quantizer`."""
        return self.inner.row_bytes(layer, dim) if layer in self.layers else dim * FP16_BYTES


def hadamard(dim: int) -> Tensor:
    """Orthonormal Hadamard matrix, float32 [dim, dim]."""
    return exact.hadamard(dim).float()


def nearest(x: Tensor, bits: int) -> Tensor:
    """The nearest of the levels ±1/2, ±3/2, ..."""
    top = 2.0 ** (bits - 1) - 0.5
    return (x.floor() + 0.5).clamp(-top, top)


def quotient(levels: Tensor, y: Tensor) -> Tensor:
    """The scale [..., 1] at which `levels` are closest to `y`."""
    return ((levels * y).sum(-1, keepdim=True) / levels.pow(2).sum(-1, keepdim=True)).clamp_min(1e-8)


def fit(y: Tensor, bits: int, fits: int = FITS) -> Tensor:
    """The scale per row, [..., 1]: from the rms, then `fits` steps of least squares."""
    s = y.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-8) * STEP[bits]
    for _ in range(fits):
        s = quotient(nearest(y / s, bits), y)
    return s


def fp8(s: Tensor) -> Tensor:
    """Scales [Hkv, T, 1] as e4m3 with one FP16 scale per page: the largest of a page becomes 448."""
    pages = s.unflatten(1, (-1, PAGE))
    unit = (pages.amax(2, keepdim=True) / 448).half().float().clamp_min(1e-7)
    return torch.flatten((pages / unit).to(torch.float8_e4m3fn).float() * unit, 1, 2)


def spread(y: Tensor, s: Tensor, r: Tensor, bits: int) -> Tensor:
    """Levels of y / s; each channel makes up for the errors of those after it, so that |R e| is small."""
    gain = r / r.diagonal(dim1=-2, dim2=-1)[..., None]
    y = y / s
    levels, e = torch.zeros_like(y), torch.zeros_like(y)
    for i in reversed(range(y.shape[-1])):
        felt = (e[..., i + 1 :] @ gain[:, i, i + 1 :, None])[..., 0]
        levels[..., i] = nearest(y[..., i] + felt, bits)
        e[..., i] = y[..., i] - levels[..., i]
    return levels


def descend(y: Tensor, levels: Tensor, r: Tensor, bits: int, sweeps: int) -> Tensor:
    """Coordinate descent on |R e|: each channel in turn is set to its best level, the others held."""
    h = r.mT @ r
    levels = levels.clone()
    slope = (y - levels) @ h
    for _ in range(sweeps):
        for i in range(y.shape[-1]):
            new = nearest(levels[..., i] + slope[..., i] / h[:, i, i, None], bits)
            slope -= (new - levels[..., i])[..., None] * h[:, None, i]
            levels[..., i] = new
    return levels


def upper(h: Tensor, damp: float) -> Tensor:
    """R, upper triangular, with R^T R = H + damp * its mean diagonal."""
    eye = torch.eye(h.shape[-1]) * h.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    root: Tensor = torch.linalg.cholesky(h + damp * eye, upper=True)
    return root


def power(c: Tensor, exponent: float, floor: float = 1e-3) -> Tensor:
    """A symmetric matrix to a power; eigenvalues are scaled to a mean of one and floored."""
    e, u = torch.linalg.eigh(c)
    e = (e / e.mean(-1, keepdim=True)).clamp_min(floor)
    powered: Tensor = u * e.pow(exponent)[..., None, :] @ u.mT
    return powered
