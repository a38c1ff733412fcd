"""The cache of converted GGUF files: a folder per file and dtype, in Hugging Face's form but for fused weights.

A folder is named by the SHA-256 of the whole file, so another file of the same name is another folder, and by the
version of this conversion. It is made beside its place, under a lock, and renamed when it is complete and on the disk:
who sees it sees all of it. It lies in the user's cache folder (`XDG_CACHE_HOME`), and may be deleted at any time that
no process uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from hackkv.errors import CheckpointError
from hackkv.model.config import read_spec
from hackkv.model.fused import OnBytes, fused_bytes, write_fused
from hackkv.model.gguf.configuration import ROPE_FACTORS, architecture_of, config_of, generation_config_of
from hackkv.model.gguf.header import GgufHeader, read_header
from hackkv.model.gguf.tensors import GgufTensors, read_vector
from hackkv.model.gguf.vocabulary import vocabulary_of

VERSION = 1
"""Increases with every change of what a conversion writes."""

WEIGHTS = "model.safetensors"
SPARE_BYTES = 64 << 20
"""Room that a conversion leaves on the disk."""


def cache_root() -> Path:
    """The folder that holds all converted files of this user."""
    return user_cache_path("hackkv") / "models"


def converted(path: Path, dtype: torch.dtype, on_bytes: OnBytes) -> Path:
    """The folder with the GGUF file `path` as a checkpoint whose weights are `dtype`; converts it if there is none.

    Several processes may ask at once: one converts, the others wait. Raises `CheckpointError` that names the file and
    the field or tensor, or the folder that cannot be written.
    """
    digest = file_digest(path)
    folder = cache_root() / f"{digest[:32]}-{str(dtype).removeprefix('torch.')}-v{VERSION}"
    if folder.is_dir():
        return folder
    header = read_header(path)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(header, digest, folder, dtype, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be converted into {folder}: {error.strerror or error}") from error
    return folder


def file_digest(path: Path) -> str:
    """SHA-256 of the file, 64 hexadecimal digits. Raises `CheckpointError` that names a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _convert(header: GgufHeader, digest: str, folder: Path, dtype: torch.dtype, on_bytes: OnBytes) -> None:
    """Write `folder`, all or nothing; the caller holds its lock."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    try:
        write_folder(header, part, dtype, on_bytes)
        if file_digest(header.path) != digest:
            raise CheckpointError(f"{header.path}: the file changed while it was converted")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_folder(header: GgufHeader, folder: Path, dtype: torch.dtype, on_bytes: OnBytes) -> None:
    """Write all files of the checkpoint into the empty `folder`. Raises `CheckpointError`, `OSError`."""
    architecture = architecture_of(header)
    config = config_of(header, read_vector(header, ROPE_FACTORS))
    vocabulary = vocabulary_of(header)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config_of(config))
    _write_json(folder / "tokenizer_config.json", vocabulary.config)
    vocabulary.core.save(str(folder / "tokenizer.json"))
    try:
        spec = read_spec(folder)
    except CheckpointError as error:
        # The fields that it names have come from the file's.
        raise CheckpointError(f"{header.path}: {str(error).removeprefix(f'{folder}{os.sep}')}") from error
    with GgufTensors(header, spec, architecture.permuted) as tensors:
        needed, free = fused_bytes(spec, dtype) + SPARE_BYTES, shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(f"{header.path}: {needed} bytes are needed in {folder.parent}, {free} are free")
        write_fused(folder / WEIGHTS, spec, dtype, tensors.rows, on_bytes)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
