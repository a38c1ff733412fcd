"""Unsupported metadata is refused with its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from hackkv.errors import CheckpointError
from hackkv.model import find_model
from hackkv.model.tiny import Tiny
from tests.model.gguf.writing import Change, write_gguf


def key(name: str, value: object) -> Change:
    """A change that sets one field in place of the writer's."""

    def change(writer: GGUFWriter) -> None:
        fields = writer.kv_data[0]
        if isinstance(value, list):
            fields.pop(name, None)
            writer.add_array(name, value)
        elif isinstance(value, str):
            fields.pop(name, None)
            writer.add_string(name, value)
        elif isinstance(value, float):
            fields.pop(name, None)
            writer.add_float32(name, value)
        elif isinstance(value, int):
            fields.pop(name, None)
            writer.add_uint32(name, value)
        else:
            fields.pop(name)

    return change


def no_tensor(name: str) -> Change:
    return lambda writer: writer.tensors[0].pop(name)


def extra(name: str, size: int) -> Change:
    return lambda writer: writer.add_tensor(name, np.linspace(1, 8, size, dtype=np.float32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (key("general.architecture", "gemma2"), "general.architecture: 'gemma2' is not one of llama, mistral, qwen2"),
        (key("general.type", "adapter"), "general.type: 'adapter' is not a model"),
        (key("split.count", 3), "split.count: a model in several files"),
        (key("llama.block_count", 1 << 31), "llama.block_count: 2147483648 layers, but the file has"),
        (key("llama.block_count", 3), "blk.2.attn_norm.weight: missing tensor"),
        (key("llama.block_count", "two"), "llama.block_count: expected a positive integer, found 'two'"),
        (key("llama.block_count", 1), "blk.1.attn_k.weight: unknown tensor"),
        (key("llama.feed_forward_length", 255), r"blk.0.ffn_gate.weight: shape F32 \[256, 128\], .* \[255, 128\]"),
        (key("llama.feed_forward_length", None), "llama.feed_forward_length: missing"),
        (key("llama.context_length", 1 << 30), "llama.context_length: 1073741824 tokens are more than"),
        (key("llama.attention.key_length", 1 << 31), "llama.attention.value_length: 64 differs from the head's"),
        (key("llama.expert_count", 8), "llama.expert_count: 8 is not supported"),
        (key("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.factor: missing"),
        (key("llama.attention.layer_norm_rms_epsilon", 0.0), "layer_norm_rms_epsilon: expected a positive number"),
        (key("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model: 'bert' is not one of gpt2, llama"),
        (key("tokenizer.ggml.pre", "mystery"), "tokenizer.ggml.pre: 'mystery' is not one of default, gpt-2, smollm"),
        (key("tokenizer.ggml.tokens", ["a", "a"]), "tokenizer.ggml.tokens: 1 tokens come twice"),
        (key("tokenizer.ggml.tokens", [str(n) for n in range(513)]), "513 tokens, but token_embd.weight has 512 rows"),
        (key("tokenizer.ggml.merges", ["no such"]), "tokenizer.ggml: no tokenizer can be made of it"),
        (key("tokenizer.ggml.token_type", [1, 2]), "tokenizer.ggml.token_type: expected one number for each token"),
        (key("tokenizer.ggml.eos_token_id", 4096), "tokenizer.ggml.eos_token_id: 4096 is no id of a token"),
        (key("tokenizer.chat_template", 3), "tokenizer.chat_template: expected text"),
        (no_tensor("token_embd.weight"), "token_embd.weight: missing tensor"),
        (no_tensor("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight: missing tensor"),
        (extra("blk.0.mystery.weight", 8), "blk.0.mystery.weight: unknown tensor"),
        (extra("rope_freqs.weight", 32), "rope_freqs.weight holds divisors that are not Llama 3's"),
    ],
)
def test_a_bad_field_or_tensor_is_named(change: Change, named: str, tmp_path: Path, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", Tiny(), change=change)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{named}"):
        find_model(str(path))
    assert not [entry for entry in own_cache.iterdir() if entry.is_dir()], "nothing half made is left"
