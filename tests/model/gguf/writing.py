"""GGUF files for tests, written by the `gguf` package from tiny random checkpoints, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from torch import Tensor

from hackkv.model.config import read_spec
from hackkv.model.gguf.tensors import gguf_name
from hackkv.model.tiny import CHAT_TEMPLATE, SPECIALS, Tiny, write_tiny

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architecture of a checkpoint -> its name in llama.cpp."""

KINDS = GGMLQuantizationType

Change = Callable[[GGUFWriter], object]


def write_gguf(path: Path, tiny: Tiny, kind: GGMLQuantizationType = KINDS.F32, change: Change | None = None) -> Path:
    """Write the checkpoint of shape `tiny` as a GGUF file with matrices of type `kind`; return `path`.

    `change` may add to the writer before it writes. The checkpoint itself stays in a folder beside the file.
    """
    folder = write_tiny(path.with_suffix(".split"), tiny)
    spec = read_spec(folder)
    architecture = ARCHITECTURES[tiny.architecture]
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    _add_tokenizer(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        _add_tensor(writer, name, tensor, kind, spec.head_dim if architecture == "llama" else 0)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType, head_dim: int) -> None:
    values = tensor.float().numpy()
    if head_dim and name.endswith(("q_proj.weight", "k_proj.weight")):
        # These lines are the converter's own: pairs at a distance of half a head become neighbours.
        heads = values.shape[0] // head_dim
        values = values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if values.ndim == 1 or kind is KINDS.F32:
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, dtype=np.float32))
        return
    data = k_blocks(values, kind) if kind in K_BYTES else quantize(values, kind)
    writer.add_tensor(gguf_name(name), data, raw_dtype=kind)


K_BYTES = {KINDS.Q4_K: 144, KINDS.Q5_K: 176, KINDS.Q6_K: 210}
"""Bytes per block of 256 values. The package reads these types but does not write them."""


def k_blocks(values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Random codes with small scales, uint8 [rows, bytes]. Tests compare the values that two readers give."""
    rows, blocks = values.shape[0], values.shape[1] // 256
    generator = np.random.default_rng(values.shape[0])
    data = generator.integers(0, 256, (rows, blocks, K_BYTES[kind]), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-5).tobytes(), np.uint8)
    if kind is KINDS.Q6_K:
        data[..., -2:] = scale
    else:
        data[..., :2] = data[..., 2:4] = scale
    return data.reshape(rows, -1)


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
