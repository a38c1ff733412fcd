"""Calibration files of random but valid tensors. Fixtures for tests of calibrated codecs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final

import torch
from hack_kernels.nuq_format import WIDTHS
from safetensors.torch import save_file
from torch import Tensor

from hackkv.codecs.artifact import METADATA, ROTATED, VERSION, ZACK
from hackkv.codecs.hadamard import hadamard
from hackkv.codecs.zack import SIDES
from measure.calibrate.solve import feedback_by

FOLDERS: Final = list[Path]()
"""What `remove_files` deletes."""


def calibration_tensors(layers: int, heads: int, dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Tensors for two families. `rot-*`: bases of condition about 10, means that are not small, gains of a positive
    definite metric. `kvquant-*`: uneven levels, and ranges about those of the tests' rows in each channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = dict[str, Tensor]()
    for layer in range(layers):
        rotation = torch.linalg.qr(normal(heads, dim, dim)).Q
        stretch = torch.exp(torch.linspace(-1.15, 1.15, dim, dtype=torch.float64))
        factors = normal(heads, dim // 8, dim)
        metric = factors.mT @ factors / dim + 0.1 * torch.eye(dim, dtype=torch.float64)
        feedback = feedback_by(metric)
        basis = rotation * stretch @ rotation.mT @ hadamard(dim)
        found = {"basis": basis, "mean": 3 * normal(heads, dim), "gains": feedback.gains, "weights": feedback.weights}
        found |= levels(normal, heads, dim)
        tensors |= {f"layers.{layer}.{name}": tensor.float().contiguous() for name, tensor in found.items()}
    return {**tensors, "frequencies": (10000.0 ** -torch.linspace(0, 1, dim // 2)).float()}


def levels(normal: Callable[..., Tensor], heads: int, dim: int) -> dict[str, Tensor]:
    """The ranges and levels of one layer, drawn by `normal`."""
    centre, reach = normal(heads, dim) / 2, 2 + normal(heads, dim).abs()
    poles = {f"{name}_poles_{bits}": normal(2**bits).sort().values for name in ("k", "v") for bits in WIDTHS}
    return {
        "k_range": torch.stack((centre - reach, centre + reach)),
        **{name: each / (each.abs().max() * 1.1) for name, each in poles.items()},
    }


@cache
def calibration_file(layers: int, heads: int, dim: int, family: str = ROTATED) -> Path:
    """A file of `calibration_tensors` for the codecs of `family`. It is deleted when the tests end."""
    path = _folder() / "calibration.safetensors"
    save_calibration(calibration_tensors(layers, heads, dim), path, codec=family)
    return path


def projection_tensors(layers: int, heads: int, dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Random rotations, and singular values by which three quarters of the channels stay in layer 0 and half in others.
    Only the QK of head 0 needs so many; other heads and V need fewer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for layer in range(layers):
        for side in SIDES:
            drawn = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
            values = torch.full((heads, dim), 1e-3)
            values[:, : dim // 4] = 1
            if side == "qk":
                values[0, : dim * 3 // 4 if layer == 0 else dim // 2] = 1
            tensors[f"layers.{layer}.{side}"] = torch.linalg.qr(drawn).Q.float().contiguous()
            tensors[f"layers.{layer}.{side}_values"] = values
    return tensors


@cache
def projection_file(layers: int, heads: int, dim: int) -> Path:
    """A file of `projection_tensors`. It is deleted when the tests end."""
    path = _folder() / "projections.safetensors"
    save_calibration(projection_tensors(layers, heads, dim), path, codec=ZACK)
    return path


def remove_files() -> None:
    """Delete all files of this module."""
    for folder in FOLDERS:
        rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    folder = Path(mkdtemp(prefix="hackkv-calibration-"))
    FOLDERS.append(folder)
    return folder


def save_calibration(tensors: dict[str, Tensor], path: Path, **about: object) -> None:
    """Write a calibration file as `hackkv calibrate` does. `about` goes into the metadata."""
    save_file(tensors, path, {METADATA: json.dumps({"version": VERSION, **about})})
