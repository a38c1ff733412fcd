"""config.json and generation_config.json of a GGUF file, in Hugging Face's words.

The fields that decide how the model computes are read or refused; nothing is guessed that the file could have said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hackkv.errors import CheckpointError
from hackkv.model.gguf.header import GgufHeader
from hackkv.model.rope import KINDS, RopeSource, plain

ROPE_FACTORS = "rope_freqs.weight"
"""float32 [D / 2]: Llama 3.1's divisors of the rotary frequencies."""

MAX_CONTEXT = 1 << 24
"""The longest context that we believe: tables of rotations have a row for each position."""

MAX_HEAD_DIM = 1 << 12
"""The widest head that we believe."""

LLAMA3_ORIGINAL = 8192
"""The context of Llama 3 before stretching. llama.cpp writes the divisors that follow from it, not the number."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str
    """Key of `hackkv.model.config.FAMILIES`."""
    permuted: bool = False
    """Whether rows of Q and K lie interleaved, as llama.cpp's rotation of neighbours wants them."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "mistral": Architecture("MistralForCausalLM", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}

REFUSED: tuple[tuple[str, Any], ...] = (
    ("expert_count", 0),
    ("attention.causal", True),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attention.scale", 0.0),
    ("attn_logit_softcapping", 0.0),
)
"""Field of the architecture -> the only value that we support; a missing field means that value."""

EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ids that end an answer: of the text, of a turn, of a message."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The row of `ARCHITECTURES`; raises `CheckpointError` for another architecture or kind of file."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise header.fail("general.architecture", f"{name!r} is not one of {', '.join(ARCHITECTURES)}")
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise header.fail("general.type", f"{kind!r} is not a model")
    if header.metadata.get("split.count", 0) > 1:
        raise header.fail("split.count", "a model in several files is not supported; join them with gguf-split")
    return ARCHITECTURES[name]


def config_of(header: GgufHeader, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """config.json; `rope_factors` is the tensor `ROPE_FACTORS`, if the file has it.

    Raises `CheckpointError` that names the file and the field.
    """
    architecture, fields = architecture_of(header), _Fields(header)
    for name, supported in REFUSED:
        if fields.get(name) not in (None, supported):
            raise fields.fail(name, f"{fields.get(name)!r} is not supported, only {supported!r}")
    layers, hidden, heads = (fields.count(n) for n in ("block_count", "embedding_length", "attention.head_count"))
    if layers > len(header.tensors):
        raise fields.fail("block_count", f"{layers} layers, but the file has {len(header.tensors)} tensors")
    if "token_embd.weight" not in header.tensors:
        raise header.fail("token_embd.weight", "missing tensor")
    window = fields.get("attention.sliding_window")
    head_dim = _head_dim(fields, hidden // heads)
    context = fields.count("context_length")
    if context > MAX_CONTEXT:
        raise fields.fail("context_length", f"{context} tokens are more than the {MAX_CONTEXT} that we believe")
    bos, eos = _ids(header, ("bos_token_id",)), _ids(header, EOS_FIELDS)
    windowed = bool(window) and architecture.name == "LlamaForCausalLM"
    return {
        # llama.cpp calls Mistral `llama` too; only the window tells them apart.
        "architectures": ["MistralForCausalLM" if windowed else architecture.name],
        "model_type": "mistral" if windowed else architecture.name.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.count("feed_forward_length"),
        "max_position_embeddings": context,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(fields, head_dim, rope_factors),
        "sliding_window": window or None,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": list(eos),
    }


def generation_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json; a GGUF file proposes no sampling settings."""
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}


class _Fields:
    """Typed access to the fields of the file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._prefix = f"{header.metadata['general.architecture']}."

    def fail(self, name: str, complaint: str) -> CheckpointError:
        return self._header.fail(self._prefix + name, complaint)

    def get(self, name: str) -> Any:
        return self._header.metadata.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(name, f"expected a positive integer, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(name, f"expected a positive number, found {value!r}")
        return float(value)


def _head_dim(fields: _Fields, default: int) -> int:
    head_dim = fields.count("attention.key_length", fields.count("rope.dimension_count", default))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            raise fields.fail(name, f"{fields.get(name)} differs from the head's {head_dim}, which is not supported")
    if head_dim > MAX_HEAD_DIM:
        raise fields.fail(
            "attention.key_length", f"{head_dim} channels are more than the {MAX_HEAD_DIM} that we believe"
        )
    return head_dim


def _rope(fields: _Fields, head_dim: int, factors: torch.Tensor | None) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.get("rope.scaling.type") or "none"
    if factors is not None:
        if kind != "none":
            raise fields.fail("rope.scaling.type", f"{kind!r} together with {ROPE_FACTORS} is not supported")
        return _llama3(fields, head_dim, theta, factors)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = fields.count("rope.scaling.original_context_length")
        return {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise fields.fail("rope.scaling.type", f"{kind!r} is not one of none, linear, yarn")


def _llama3(fields: _Fields, head_dim: int, theta: float, factors: torch.Tensor) -> dict[str, Any]:
    """The parameters of Llama 3.1's stretching that give these divisors, if they are those that Llama 3.x uses."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(float(factors.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }
    unstretched = plain(theta, head_dim)
    inverse, _ = KINDS["llama3"](RopeSource(parameters, head_dim, LLAMA3_ORIGINAL))
    if factors.shape != inverse.shape or not torch.allclose(unstretched / factors, inverse, rtol=1e-4, atol=0.0):
        raise fields.fail("rope.dimension_count", f"{ROPE_FACTORS} holds divisors that are not Llama 3's")
    return parameters


def _ids(header: GgufHeader, names: tuple[str, ...]) -> tuple[int, ...]:
    """Token ids under `names`, those that are there, without repeats."""
    found = dict[int, None]()
    for name in names:
        value = header.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise header.fail(f"tokenizer.ggml.{name}", f"expected a token id, found {value!r}")
        found[value] = None
    return tuple(found)
