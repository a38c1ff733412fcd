"""A checkpoint's hash, for the fingerprint that both ends of a handoff compare.

It covers config.json and tokenizer.json whole. It covers the name, the size, the header and the data of every
safetensors file: all data up to 16 MiB; of a larger file 256 blocks of 16 KiB at even distances, the first and the last
included.

It detects: another model, another fine-tune of the same model, another dtype or sharding, a retrained or partly copied
checkpoint. It does not detect a few changed values between the sampled blocks of a large file, and it does not resist
forgery. In return it costs a second, not a minute, at every start of a node.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import xxhash

from hackkv.errors import CheckpointError
from hackkv.model.gguf.cache import source_of
from hackkv.model.weights import weight_files

WHOLE_BYTES = 16 << 20
BLOCK_BYTES = 16 << 10
BLOCKS = 256


def model_hash(folder: Path) -> str:
    """32 hexadecimal digits (XXH3-128); raises `CheckpointError` that names a file that is missing or unreadable."""
    digest = xxhash.xxh3_128()
    for path in (folder / "config.json", folder / "tokenizer.json", *weight_files(folder)):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\n".encode())
            with path.open("rb") as file:
                _update(digest, file, size)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest()


def source_hash(folder: Path) -> str:
    """The hash by which a calibration names its model: 32 hexadecimal digits, equal for all dtypes of a GGUF file.

    For any other checkpoint it is `model_hash`. Raises `CheckpointError` as that does.
    """
    return source_of(folder) or model_hash(folder)


def _update(digest: xxhash.xxh3_128, file: BinaryIO, size: int) -> None:
    if size <= WHOLE_BYTES:
        digest.update(file.read())
        return
    header_bytes = 8 + int.from_bytes(file.read(8), "little")
    file.seek(0)
    digest.update(file.read(min(header_bytes, WHOLE_BYTES)))
    for block in range(BLOCKS):
        file.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
        digest.update(file.read(BLOCK_BYTES))
