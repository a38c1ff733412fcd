"""The result of a codec's calibration: tensors in a safetensors file that a setting names.

The file's digest belongs to the codec's fingerprint, its path does not: two nodes may keep the file in different
places, but its bytes must be equal. Digest and tensors come from one read of the whole file. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

MAX_BYTES: Final = 1 << 30
"""The largest file that is read; a rotation of every layer and KV head of a large model takes a tenth of it."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The tensors of a calibration file."""

    path: Path
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    tensors: Mapping[str, Tensor] = field(repr=False)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as float32. Raises `ValueError` that names file and tensor if it is not as it should be."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: {name}: missing tensor")
        found = self.tensors[name]
        if tuple(found.shape) != shape:
            raise ValueError(f"{self.path}: {name}: shape {list(found.shape)}, expected {list(shape)}")
        if not found.dtype.is_floating_point:
            raise ValueError(f"{self.path}: {name}: dtype {found.dtype}, expected a floating-point type")
        wide = found.to(torch.float32)
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(f"{self.path}: {name}: a value is not finite")
        return wide


def read_artifact(path: Path, max_bytes: int = MAX_BYTES) -> Artifact:
    """Read a calibration file. Raises `ValueError` that names it if it is missing, too large or no safetensors file."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes} bytes")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or not a safetensors file: {error}") from error
    return Artifact(path, hashlib.sha256(data).hexdigest(), tensors)
