"""Small random checkpoints in Hugging Face's format, written without transformers' modelling code.

They have the real thing's files (config, safetensors, byte-level BPE tokenizer, chat template), so tests and soaks of
the whole cluster go the same way as a real model.
"""

from __future__ import annotations

import json
import math
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hackkv.model.config import FAMILIES, read_spec
from hackkv.model.layout import split_shapes
from hackkv.model.weights import INDEX, SINGLE

SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>")
VOCAB = 512
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tiny:
    """Shape of a random checkpoint; `architecture` is a key of `FAMILIES`."""

    architecture: str = "LlamaForCausalLM"
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 256
    vocab: int = VOCAB
    """Ids with an embedding; the tokenizer knows the first 512 of them."""
    max_context: int = 4096
    tie_embeddings: bool = False
    shards: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """More entries of config.json, such as `rope_scaling` or `sliding_window`."""


def write_tiny(folder: Path, tiny: Tiny) -> Path:
    """Write a checkpoint of shape `tiny` into `folder` (made if need be); returns `folder`. Same input, same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    _write_json(folder / "config.json", _config(tiny))
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1], "temperature": 1.0})
    generator = torch.Generator().manual_seed(tiny.seed)
    shapes = split_shapes(read_spec(folder))
    tensors = {name: _draw(name, shape, generator).to(tiny.dtype) for name, shape in shapes.items()}
    _write_tensors(folder, tensors, tiny.shards)
    return folder


def _config(tiny: Tiny) -> dict[str, Any]:
    return {
        "architectures": [tiny.architecture],
        "model_type": FAMILIES[tiny.architecture].name,
        "num_hidden_layers": tiny.layers,
        "hidden_size": tiny.hidden,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.ffn,
        "max_position_embeddings": tiny.max_context,
        "vocab_size": tiny.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": tiny.tie_embeddings,
        "torch_dtype": str(tiny.dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | tiny.extra


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values that keep activations near unit size, and logits spread enough to have a clear maximum."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if name.endswith("bias"):
        return 0.2 * values
    if "embed_tokens" in name:
        return values
    gain = 3.0 if "lm_head" in name else 1.0
    return values * (gain / math.sqrt(shape[-1]))


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    names = list(tensors)
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    for shard, file in enumerate(files):
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file, metadata={"format": "pt"})
    weight_map = {name: files[index % shards] for index, name in enumerate(names)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on a few sentences: a merge or two per word, and every byte covered."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CHAT_TEMPLATE, __doc__ or "", string.printable], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
