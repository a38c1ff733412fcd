"""The cache of converted GGUF files: a folder per file, dtype and packing, in Hugging Face's form with fused weights.

A folder is named by the SHA-256 of the whole file, so another file of the same name is another folder, and by the
version of this conversion. It is made beside its place, under a lock, and renamed when it is complete and on the disk,
so a process that sees a folder sees all of it. It lies in the user's cache folder (`XDG_CACHE_HOME`), and may be
deleted at any time that no process uses it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from hackkv.errors import CheckpointError
from hackkv.model.fused import OnBytes
from hackkv.model.packing import NOTHING, Packing

VERSION = 1
"""Increases with every change of what a conversion writes."""

CONVERSION = "hackkv.model.gguf.conversion"
"""The module that converts. It is loaded for a conversion only: converted files are found without it."""


def cache_root() -> Path:
    """The folder that holds all converted files of this user."""
    return user_cache_path("hackkv") / "models"


def converted(path: Path, dtype: torch.dtype, on_bytes: OnBytes, packing: Packing = NOTHING) -> Path:
    """The folder with the GGUF file `path` as a checkpoint whose weights are `dtype`, or packed; converts it if there
    is none.

    Several processes may ask at once: one converts, the others wait. Raises `CheckpointError` that names the file and
    the field or tensor, or the folder that cannot be written.
    """
    digest = file_digest(path)
    form = "-".join(filter(None, (str(dtype).removeprefix("torch."), packing.name)))
    folder = cache_root() / f"{digest[:32]}-{form}-v{VERSION}"
    if folder.is_dir():
        return folder

    def write(part: Path) -> None:
        import_module(CONVERSION).write_folder(path, part, dtype, on_bytes, packing)

    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(path, digest, folder, write)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be converted into {folder}: {error.strerror or error}") from error
    return folder


def source_of(folder: Path) -> str:
    """The first 32 digits of the SHA-256 of the GGUF file that `folder` was made of; empty for any other folder."""
    return folder.name.partition("-")[0] if folder.parent == cache_root() else ""


def file_digest(path: Path) -> str:
    """SHA-256 of the file, 64 hexadecimal digits. Raises `CheckpointError` that names a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _convert(path: Path, digest: str, folder: Path, write: Callable[[Path], None]) -> None:
    """Write `folder`, all or nothing; the caller holds its lock."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    try:
        write(part)
        if file_digest(path) != digest:
            raise CheckpointError(f"{path}: the file changed while it was converted")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
