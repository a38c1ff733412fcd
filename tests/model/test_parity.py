"""Logits equal transformers' eager attention, however the tokens are cut into forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hackkv.model import Llama, load_model
from hackkv.model.config import FAMILIES
from hackkv.model.exact import ExactKv, advance
from hackkv.model.products import ALWAYS, NEVER
from hackkv.model.tiny import Tiny

MakeTiny = Callable[[Tiny], Path]

SHAPES = [
    *(pytest.param(Tiny(name), id=family.name) for name, family in FAMILIES.items()),
    pytest.param(Tiny(head_dim=128, heads=2, kv_heads=2, tie_embeddings=True, shards=3), id="sharded-tied-mha"),
    pytest.param(Tiny("Qwen3ForCausalLM", heads=6, kv_heads=2, head_dim=96, hidden=192, ffn=172), id="odd-sizes"),
]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: list[Any] = [
    pytest.param({"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5}, id="llama3-old"),
    pytest.param({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, id="llama3-new"),
    pytest.param({"rope_scaling": {"type": "linear", "factor": 4.0}}, id="linear"),
    pytest.param({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, id="dynamic"),
    pytest.param({"rope_scaling": {"rope_type": "yarn", **YARN}, "max_position_embeddings": 256}, id="yarn"),
    pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, id="theta"),
]
LENGTHS = (150, 1, 37)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def theirs(folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float() for ids in sequences]


def whole(model: Llama, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    return [model.logits(advance(model, [(ExactKv(), ids)])) for ids in sequences]


def chunked(model: Llama, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    results = []
    for ids in sequences:
        cache = ExactKv()
        parts = [advance(model, [(cache, ids[start : start + 64])]) for start in range(0, len(ids), 64)]
        results.append(model.logits(torch.cat(parts)))
    return results


def ragged(model: Llama, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    hidden = advance(model, [(ExactKv(), ids) for ids in sequences])
    return list(model.logits(hidden).split([len(ids) for ids in sequences]))


def decoded(model: Llama, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Prefill all but the last 20 tokens, then decode all sequences together, one token each step."""
    caches = [ExactKv() for _ in sequences]
    starts = [max(len(ids) - 20, 0) for ids in sequences]
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for cache, ids, start, row in zip(caches, sequences, starts, rows, strict=True):
        row += [advance(model, [(cache, ids[:start])])] if start else []
    for step in range(20):
        alive = [index for index, ids in enumerate(sequences) if starts[index] + step < len(ids)]
        batch = [(caches[index], sequences[index][starts[index] + step :][:1]) for index in alive]
        for index, hidden in zip(alive, advance(model, batch).split(1), strict=True):
            rows[index].append(hidden)
    return [model.logits(torch.cat(row)) for row in rows]


WAYS = [whole, chunked, ragged, decoded]


FLOAT32_TOLERANCE = 1e-5
"""A few dozen float32 roundings, in units of the logits' standard deviation."""


def worst(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest difference in units of the logits' standard deviation."""
    return max(((a - b).abs().max() / b.std()).item() for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("tiny", SHAPES)
def test_float32_logits_equal_transformers(tiny: Tiny, make_tiny: MakeTiny) -> None:
    folder = make_tiny(tiny)
    reference = theirs(folder, prompts())
    for library_rows in (ALWAYS, 4, NEVER):
        model = load_model(folder, "float32", library_rows=library_rows)
        for way in WAYS:
            assert worst(way(model, prompts()), reference) < FLOAT32_TOLERANCE, (way.__name__, library_rows)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("tiny", SHAPES)
def test_bfloat16_error_is_that_of_transformers(tiny: Tiny, make_tiny: MakeTiny) -> None:
    """The true value is float32's on the same weights. Our error may be at most 1.5 times that of transformers."""
    folder = make_tiny(Tiny(**{name: getattr(tiny, name) for name in tiny.__slots__} | {"dtype": torch.bfloat16}))
    truth = theirs(folder, prompts())
    budget = [
        (a - b).square().mean().sqrt() for a, b in zip(theirs(folder, prompts(), torch.bfloat16), truth, strict=True)
    ]
    model = load_model(folder, "bfloat16")
    for way in WAYS:
        for ours, exact, allowed in zip(way(model, prompts()), truth, budget, strict=True):
            assert (ours - exact).square().mean().sqrt() <= 1.5 * allowed, way.__name__


@pytest.mark.parametrize("extra", ROPES)
def test_rope_variants(extra: dict[str, Any], make_tiny: MakeTiny) -> None:
    folder = make_tiny(Tiny(layers=1, extra=extra))
    model = load_model(folder, "float32")
    assert worst(chunked(model, prompts()), theirs(folder, prompts())) < FLOAT32_TOLERANCE


def test_half_precision_checkpoints_load_as_float32(make_tiny: MakeTiny) -> None:
    folder = make_tiny(Tiny(dtype=torch.float16))
    assert worst(whole(load_model(folder, "float32"), prompts()), theirs(folder, prompts())) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_that_transformers_saved(name: str, make_tiny: MakeTiny, tmp_path: Path) -> None:
    """Transformers 5 writes config.json with newer keys."""
    folder = make_tiny(Tiny(name))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    saved, original = load_model(tmp_path, "float32"), load_model(folder, "float32")
    assert saved.spec.rope == original.spec.rope
    assert worst(whole(saved, prompts()), whole(original, prompts())) == 0
