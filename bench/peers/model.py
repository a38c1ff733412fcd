"""One set of random weights as a Hugging Face checkpoint and, read back from it, as GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hackkv.model.tiny import Tiny, write_tiny

SHAPE = Tiny(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=128,
    ffn=2816,
    vocab=32_000,
    max_context=40_960,
    dtype=torch.bfloat16,
)


def write_checkpoint(folder: Path) -> Path:
    """Write the checkpoint into `folder` unless it is there; returns `folder`."""
    return folder if (folder / "config.json").exists() else write_tiny(folder, SHAPE)


def prompt_ids(count: int) -> list[int]:
    """Token ids 3.. of the vocabulary, drawn at random; the same for everybody."""
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(3, SHAPE.vocab, (count,), generator=generator).tolist()
    return ids


def write_prompt(path: Path, count: int) -> Path:
    """The same ids as a JSON file."""
    path.write_text(json.dumps(prompt_ids(count)), encoding="utf-8")
    return path
