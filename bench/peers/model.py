"""Models and prompts: random weights with random ids, or SmolLM2 with text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hackkv.model.config import read_spec
from hackkv.model.layout import fused_parts, split_shapes
from hackkv.model.tiny import Tiny, write_tiny
from measure.serve.prompts import PromptMaker, find_tokenizer

WEIGHTS = "model.safetensors"

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
    """Random token ids from 3 on. They depend on `count` alone, so all systems get the same."""
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(3, SHAPE.vocab, (count,), generator=generator).tolist()
    return ids


def text_prompts(checkpoint: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Held-out text in the checkpoint's tokens, each prompt from another place. All systems get the same."""
    maker, rng = PromptMaker(find_tokenizer(str(checkpoint))), np.random.default_rng(len(lengths))
    return [maker.ids(length, rng) for length in lengths]


def write_split(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint of ours, whose matrices are fused, in the form that others read, unless it exists. Returns
    `folder`."""
    if not (folder / WEIGHTS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec, fused = read_spec(checkpoint), load_file(checkpoint / WEIGHTS)
        shapes = split_shapes(spec)
        split = dict[str, torch.Tensor]()
        for name, parts in fused_parts(spec).items():
            rows = fused[name].split([shapes[part][0] for part in parts])
            split |= {part: each.contiguous() for part, each in zip(parts, rows, strict=True)}
        for each in checkpoint.glob("*.json"):
            shutil.copy(each, folder)
        save_file(split, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
