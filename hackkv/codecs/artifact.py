"""The result of a codec's calibration: tensors in a safetensors file that a setting names.

The file's digest belongs to the codec's fingerprint, its path does not: two nodes may keep the file in different
places, but its bytes must be equal. Digest and tensors come from one read of the whole file. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hackkv.codec import Origin

UNCALIBRATED: Final = "none"
"""The value of a codec's setting `calibration` that names no file."""

ROTATED, KVQUANT, ZACK = "rot", "kvquant", "zack"
"""Families of codecs that read a calibration file. A file that names no family is of the first."""

METADATA: Final = "hackkv"
"""The only metadata key of the file. Its value is JSON. The library writes several keys in any order, and equal
measurements must give equal bytes."""

VERSION: Final = 3
"""The version of the file's contents. 2 added weights to the gains, which 1 called `feedback`. 3 added bits for several
presets."""

MAX_BYTES: Final = 1 << 30
"""The largest file that is read. Rotations of every layer and KV head of a large model take a tenth of it."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The tensors of a calibration file."""

    path: Path
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    about: Mapping[str, Any]
    """The JSON of the metadata, as `hackkv calibrate` wrote it. Empty where there is none."""

    @property
    def origin(self) -> Origin:
        """The model that the file was made for, as far as the file says."""
        return Origin(self.path, str(self.about.get("model", "")), str(self.about.get("model_hash", "")))

    @property
    def family(self) -> str:
        """The codecs that the file is for, as `hackkv calibrate` names them."""
        return str(self.about.get("codec", ROTATED))

    def check(self, family: str) -> None:
        """Raises `ValueError` naming the file if its tensors are for codecs of another family than `family`, or if it
        has another version than `VERSION`."""
        if self.family != family:
            raise ValueError(f"{self.path}: made by hackkv calibrate {self.family}, not by hackkv calibrate {family}")
        found = self.about.get("version", 1)
        if found != VERSION:
            raise ValueError(
                f"{self.path}: a calibration file of version {found}, expected {VERSION}; "
                f"make it anew with hackkv calibrate"
            )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as float32. Raises `ValueError` naming file and tensor if it is missing, has another shape or no
        floating-point type, or holds a value that is not finite."""
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
    return Artifact(path, hashlib.sha256(data).hexdigest(), tensors, _about(path, data))


def _about(path: Path, data: bytes) -> dict[str, Any]:
    """The metadata of a file that the library could read: 8 bytes, the length of the header, then the JSON header."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        about = json.loads(header.get("__metadata__", {}).get(METADATA, "{}"))
    except ValueError as error:
        raise ValueError(f"{path}: metadata {METADATA!r}: no JSON: {error}") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path}: metadata {METADATA!r}: no JSON object")
    return about
