"""Turns a GGUF file into a checkpoint in Hugging Face's form, but for fused weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

from hackkv.errors import CheckpointError
from hackkv.model.config import ModelSpec, read_spec
from hackkv.model.fused import OnBytes, Packed, fused_bytes, write_fused
from hackkv.model.gguf.configuration import ROPE_FACTORS, architecture_of, config_of, generation_config_of
from hackkv.model.gguf.header import read_header
from hackkv.model.gguf.tensors import GgufTensors, read_vector
from hackkv.model.gguf.vocabulary import vocabulary_of
from hackkv.model.layout import fused_parts, fused_shapes
from hackkv.model.packing import Packing

WEIGHTS = "model.safetensors"
SPARE_BYTES = 64 << 20
"""Room that a conversion leaves on the disk."""


def write_folder(path: Path, folder: Path, dtype: torch.dtype, on_bytes: OnBytes, packing: Packing) -> None:
    """Write the GGUF file `path` as a checkpoint into the empty `folder`. Raises `CheckpointError`, `OSError`."""
    header = read_header(path)
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
        # The fields that the error names come from the GGUF file.
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{folder}{os.sep}')}") from error
    with GgufTensors(header, spec, architecture.permuted) as tensors:
        bits = _bits(spec, tensors, packing)
        needed, free = fused_bytes(spec, dtype, bits) + SPARE_BYTES, shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(f"{path}: {needed} bytes are needed in {folder.parent}, {free} are free")
        write_fused(folder / WEIGHTS, spec, dtype, tensors.rows, on_bytes, Packed(bits, tensors.codes))


def _bits(spec: ModelSpec, tensors: GgufTensors, packing: Packing) -> dict[str, int]:
    """The fused tensors that are packed. A tensor whose parts have several forms in the file counts as numbers."""
    found, shapes = dict[str, int](), fused_shapes(spec)
    for name, parts in fused_parts(spec).items():
        held = {tensors.held(part) for part in parts}
        bits = packing.bits_for(name, shapes[name], held.pop() if len(held) == 1 else None)
        if bits is not None:
            found[name] = bits
    return found


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
