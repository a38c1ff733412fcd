"""Logits of a GGUF file equal those of transformers' own GGUF loading; tokens equal those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hackkv.model import find_model, load_model
from hackkv.model.config import FAMILIES
from hackkv.model.exact import ExactKv, advance
from hackkv.model.gguf.header import TYPES
from hackkv.model.tiny import Tiny
from hackkv.tokenizer import Tokenizer
from tests.model.gguf.writing import KINDS, write_gguf

PROMPT = torch.randint(3, 512, (150,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 1e-5
"""A few dozen float32 roundings, in units of the logits' standard deviation."""
WIDE = Tiny(layers=1, hidden=256, heads=4, ffn=512)
"""Blocks of the K types hold 256 values of a row."""


def ours(path: Path) -> Tensor:
    model = load_model(find_model(str(path), "float32").path, "float32")
    return model.logits(advance(model, [(ExactKv(), PROMPT)]))


def theirs(path: Path) -> Tensor:
    """Logits of transformers in float64, so that the only roundings are this project's."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float64
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def split(path: Path) -> Tensor:
    """Logits of the checkpoint that the file was written from."""
    model = load_model(path.with_suffix(".split"), "float32")
    return model.logits(advance(model, [(ExactKv(), PROMPT)]))


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, in standard deviations of b."""
    return ((a - b).abs().max() / b.std()).item()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_of_tensor_equals_transformers(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", WIDE, kind)
    assert apart(ours(path), theirs(path)) < TOLERANCE


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_equals_transformers_and_the_checkpoint(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    # transformers takes Qwen3's head to be 128 wide, whatever the file says.
    head = 128 if architecture.startswith("Qwen3") else 64
    tiny = Tiny(architecture, head_dim=head, heads=256 // head, kv_heads=1, hidden=256, tie_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", tiny)
    assert apart(ours(path), theirs(path)) < TOLERANCE
    assert apart(ours(path), split(path)) == 0


def test_q8_rows_in_several_blocks_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", Tiny(heads=8, kv_heads=4), KINDS.Q8_0)
    whole = ours(path)
    monkeypatch.setattr("hackkv.model.gguf.tensors.BLOCK_VALUES", 1)
    monkeypatch.setattr("hackkv.model.gguf.cache.VERSION", 0)
    assert torch.equal(ours(path), whole)


def test_llama3_stretches_its_rotation(tmp_path: Path) -> None:
    llama3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    tiny = Tiny(extra={"rope_scaling": {"rope_type": "llama3", **llama3}, "rope_theta": 5e5})

    def add_factors(writer: GGUFWriter) -> None:
        plain = 1.0 / 5e5 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
        stretched = torch.tensor(load_model(tmp_path / "model.split", "float32").spec.rope.inv_freq)
        writer.add_tensor("rope_freqs.weight", (plain / stretched).numpy())

    path = write_gguf(tmp_path / "model.gguf", tiny, change=add_factors)
    assert apart(ours(path), split(path)) < TOLERANCE


def test_a_window_makes_it_mistral_and_caps_the_context(tmp_path: Path) -> None:
    tiny = Tiny("MistralForCausalLM", extra={"sliding_window": 1024})
    path = write_gguf(tmp_path / "model.gguf", tiny, change=lambda writer: writer.add_sliding_window(1024))
    spec = load_model(find_model(str(path), "float32").path, "float32").spec
    assert (spec.family, spec.max_context) == ("mistral", 1024)
    assert apart(ours(path), split(path)) == 0


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_stretched_rotations(kind: str, tmp_path: Path) -> None:
    original = {"original_max_position_embeddings": 1024} if kind == "yarn" else {}

    def add_scaling(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        if original:
            writer.add_uint32("llama.rope.scaling.original_context_length", 1024)

    tiny = Tiny(extra={"rope_scaling": {"rope_type": kind, "factor": 4.0, **original}})
    path = write_gguf(tmp_path / "model.gguf", tiny, change=add_scaling)
    assert apart(ours(path), split(path)) == 0


def test_tokens_template_and_ends_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", Tiny())
    folder = find_model(str(path)).path
    from_gguf, from_split = Tokenizer(folder), Tokenizer(path.with_suffix(".split"))
    text = "def f(x):\n    return 'ünï', 1234 <|end|>"
    assert from_gguf.encode(text) == from_split.encode(text)
    assert from_gguf.decode(from_gguf.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hello."}]
    assert from_gguf.chat(messages) == from_split.chat(messages)
    assert from_gguf.special_ids == from_split.special_ids
    assert from_gguf.bos_id == 0
    assert load_model(folder).spec.eos_ids == (1,)
