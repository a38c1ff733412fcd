"""Calibration files of random but sound tensors: where tests of calibrated codecs start."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file
from torch import Tensor

from hackkv.codecs.hadamard import hadamard


def calibration_tensors(layers: int, heads: int, dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Bases of condition about 10, means that are not small, gains of a positive definite metric."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = dict[str, Tensor]()
    for layer in range(layers):
        turned = torch.linalg.qr(normal(heads, dim, dim)).Q
        stretch = torch.exp(torch.linspace(-1.15, 1.15, dim, dtype=torch.float64))
        factors = normal(heads, dim // 8, dim)
        metric = factors.mT @ factors / dim + 0.1 * torch.eye(dim, dtype=torch.float64)
        root = torch.linalg.cholesky(metric, upper=True)
        gains = (root / root.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1)
        basis = turned * stretch @ turned.mT @ hadamard(dim)
        for name, tensor in (("basis", basis), ("mean", 3 * normal(heads, dim)), ("feedback", gains)):
            tensors[f"layers.{layer}.{name}"] = tensor.float().contiguous()
    return tensors


@cache
def calibration_file(layers: int, heads: int, dim: int) -> Path:
    """A file of `calibration_tensors`, which is there until the tests end."""
    folder = Path(mkdtemp(prefix="hackkv-calibration-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    path = folder / "calibration.safetensors"
    save_file(calibration_tensors(layers, heads, dim), path)
    return path
