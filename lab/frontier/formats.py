"""The formats that were tried, by name.

`K3V2-r2` has 3 bits for K and 2 for V, and 2 recent pages. With the prefix `S-` the constants are moments at all
positions of the context, else at those of the calibration windows. In `a/b` only the side that is not `exact` is
quantized. `-int8` rounds q and P as a kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hack_kernels.level_format import REFITS, STRETCH
from torch import Tensor

from lab.frontier.calib import Moments
from lab.frontier.core import Kv, Rounding
from lab.frontier.lattice import Vectors, d4, e8
from lab.frontier.quant import Channel, Components, OnLayers, Tok, hadamard, power, upper

PAIRS = ((2, 2), (3, 2), (3, 3), (4, 3), (4, 4))
"""(bits of K, bits of V)"""
LOUD_KEYS = frozenset((7, 8, 20, 23))
"""Layers of SmolLM2 whose attention suffers most from K at 2 bits (`lab.frontier.proxy`, window `data`)."""


@dataclass(frozen=True)
class Basis:
    """Constants of a side, [layers, Hkv, D, D] and [layers, Hkv, D]."""

    to: Tensor
    back: Tensor
    mean: Tensor
    feedback: Tensor

    def tok(self, bits: int | list[int], passes: int = 4) -> Tok:
        """Rows in this basis, with feedback."""
        return Tok(bits, self.to, self.back, self.mean, self.feedback, passes)


def basis(kk: Tensor, qq: Tensor, mean: Tensor, alpha: float = 0.5, damp: float = 0.1) -> Basis:
    """Covariance to the power -alpha / 2, then Hadamard; feedback by the metric `qq` in this basis."""
    to = power(kk, -alpha / 2) @ hadamard(kk.shape[-1])
    back = torch.linalg.inv(to)
    return Basis(to, back, mean, upper(back @ qq @ back.mT, damp))


def rotated(bits: int | list[int], dim: int, mean: Tensor | None = None) -> Tok:
    """Rows in the Hadamard basis, without feedback."""
    return Tok(bits, hadamard(dim), hadamard(dim), mean)


def components(kk: Tensor, qq: Tensor, mean: Tensor, count: int, bits: int) -> Components:
    """The first `count` principal components of rows of covariance `kk`; the rest is coded in `basis`."""
    u = torch.linalg.eigh(kk).eigenvectors[..., -count:]
    without = torch.eye(kk.shape[-1]) - u @ u.mT
    rest = basis(without @ kk @ without, qq, mean).tok(bits, passes=REFITS)
    return Components(u, mean, replace(rest, stretch=STRETCH[bits]))


def formats(own: Moments, every: Moments) -> list[Kv]:
    """All formats. `own`: moments at the windows' own positions; `every`: at every position of the context."""
    found = [*keys_alone(own), *values_alone(own), *simple(own), *pairs("", own), *pairs("S-", every), *mixed(every)]
    return [*found, *sealed(every), *vectors(every)]


def keys_alone(c: Moments) -> list[Kv]:
    """K quantized, V exact."""
    d = c.kk.shape[-1]
    h = hadamard(d)
    out = []
    for bits in (2, 3, 4):
        out.append(Kv(f"rot{bits}/exact", rotated(bits, d), None))
        out.append(Kv(f"rot{bits}m/exact", rotated(bits, d, c.k_mean), None))
        for damp in (0.01, 0.1):
            fed = Tok(bits, h, h, c.k_mean, upper(h @ c.qq @ h, damp), passes=2)
            out.append(Kv(f"fed{bits}-{damp}/exact", fed, None))
            out.append(Kv(f"fed0{bits}-{damp}/exact", replace(fed, mean=None), None))
            for name, alpha in (("white", 1.0), ("whitehalf", 0.5)):
                k = basis(c.kk, c.qq, c.k_mean, alpha, damp).tok(bits, passes=2)
                out.append(Kv(f"{name}{bits}-{damp}/exact", k, None))
    return out


def values_alone(c: Moments) -> list[Kv]:
    """V quantized, K exact."""
    layers, d = c.vv.shape[0], c.vv.shape[-1]
    h = hadamard(d)
    out = [Kv(f"exact/rot{bits}", None, rotated(bits, d)) for bits in (2, 3, 4)]
    out.append(Kv("exact/Vwhite2", None, basis(c.vv, c.oo, c.v_mean).tok(2)))
    out.append(Kv("exact/Vfed2", None, Tok(2, h, h, None, upper(h @ c.oo @ h, 0.1))))
    for first in range(0, layers, 6):
        some = range(first, min(first + 6, layers))
        out.append(Kv(f"exact/V2 in {some[0]}-{some[-1]}", None, OnLayers(rotated(2, d), some)))
    return out


def simple(c: Moments) -> list[Kv]:
    """Both sides quantized: K without feedback, or with two refits of the scale."""
    d = c.kk.shape[-1]
    v2 = rotated(2, d)
    out = [Kv("chan3/rot2", Channel(3), v2), Kv("rot2/rot2", rotated(2, d), v2)]
    out += [Kv(f"rot{bits}m/rot2", rotated(bits, d, c.k_mean), v2) for bits in (2, 3)]
    k = basis(c.kk, c.qq, c.k_mean)
    for name, (k_bits, v_bits) in zip("abced", PAIRS, strict=True):
        kv = rounded_too(Kv(f"{name}0.1", None, None), k.tok(k_bits, passes=2), rotated(v_bits, d))
        out += [*kv, replace(kv[0], name=f"{name}0.1-r2", recent=2), replace(kv[0], name=f"{name}0.1-s2", sink=2)]
    return out


def pairs(prefix: str, c: Moments) -> list[Kv]:
    """K with basis and feedback, V in the Hadamard basis."""
    k, d = basis(c.kk, c.qq, c.k_mean), c.kk.shape[-1]
    out = []
    for k_bits, v_bits in PAIRS:
        for recent in (1, 2):
            kv = Kv(f"{prefix}K{k_bits}V{v_bits}-r{recent}", None, None, recent=recent)
            out += rounded_too(kv, k.tok(k_bits), rotated(v_bits, d))
    return out


def mixed(c: Moments) -> list[Kv]:
    """The formats of `pairs` with one more bit in some layers."""
    layers, d = c.kk.shape[0], c.kk.shape[-1]
    k = basis(c.kk, c.qq, c.k_mean)
    loud = [3 if i in LOUD_KEYS else 2 for i in range(layers)]
    out = [Kv("S-K2+V2-r2", k.tok(loud), rotated(2, d), recent=2)]
    for name, first in (("early", 0), ("middle", 9), ("late", 18)):
        v = rotated([3 if first <= i < first + 12 else 2 for i in range(layers)], d)
        out.append(Kv(f"S-K3V2+{name}-r2", k.tok(3), v, recent=2))
    return out


def sealed(c: Moments) -> list[Kv]:
    """K sealed as by the codecs `rot-*`, and variants. `fp8-` has scales in FP8. `rms-` takes the scale from a row's
    rms without least squares, except for the refit under feedback. `unfit-` does not refit scales. `plain-` and K by
    channel (`chan-`) have no feedback."""
    b, d = basis(c.kk, c.qq, c.k_mean), c.kk.shape[-1]
    out = []
    for k_bits, v_bits in PAIRS:
        tok, v = b.tok(k_bits, passes=REFITS), rotated(v_bits, d)
        stretched = replace(tok, stretch=STRETCH[k_bits])
        for prefix, k, values in (
            ("rot-", stretched, v),
            ("fp8-", replace(stretched, fp8_scale=True), replace(v, fp8_scale=True)),
            ("rms-", replace(stretched, fits=0), replace(v, fits=0)),
            ("unfit-", replace(tok, passes=0), v),
            ("plain-", rotated(k_bits, d), v),
            ("plain-rms-", replace(rotated(k_bits, d), fits=0), replace(v, fits=0)),
            ("chan-", Channel(k_bits), v),
        ):
            out.append(Kv(f"{prefix}K{k_bits}V{v_bits}-r2", k, values, recent=2))
    return out


def vectors(c: Moments) -> list[Kv]:
    """2 bits as in `rot-K2V2-r2`, with codes of vectors, or with separate principal components of K."""
    b, d = basis(c.kk, c.qq, c.k_mean), c.kk.shape[-1]
    h, out = hadamard(d), list[Kv]()
    for name, lattice in (("d4", d4()), ("e8", e8())):
        k = Vectors(lattice, b.to, b.back, b.mean, b.feedback)
        out.append(Kv(f"{name}-K2V2-r2", k, Vectors(lattice, h, h), recent=2))
    for count in (4, 8):
        out.append(Kv(f"pc{count}-K2V2-r2", components(c.kk, c.qq, c.k_mean, count, 2), rotated(2, d), recent=2))
    return out


def rounded_too(kv: Kv, k: Tok, v: Tok) -> list[Kv]:
    """The format with these sides, and a copy with q and P rounded."""
    plain = replace(kv, k=k, v=v)
    return [plain, replace(plain, name=f"{kv.name}-int8", rounding=Rounding(k, v))]
