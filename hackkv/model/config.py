"""The contents of a checkpoint's config.json, checked and in our own words.

Every family that we serve is one row of `FAMILIES`; every option that would change the computation in a way that
`Llama` does not know is one row of `REFUSED`. Rotary frequencies (`rope`) are kept as plain numbers, so that a spec can
be compared, hashed and pickled.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hackkv.errors import CheckpointError
from hackkv.model.rope import KINDS, Rope, RopeSource, make_rope
from hackkv.types import KvLayout, KvShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of an architecture from Llama."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on every head of Q and K, before the rotation."""
    windowed: bool = False
    """`sliding_window` limits attention. We serve such a model up to its window, where full attention is the same."""
    head_dim: int | None = None
    """The default where config.json has no head_dim; None means hidden_size / num_attention_heads."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", windowed=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128),
}

REFUSED: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("use_sliding_window", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)
"""Field of config.json -> the only value that we support; a missing field or null means that value."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of one model."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rms_eps: float
    rope: Rope
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_context: int
    """Longest prompt plus output, in tokens."""
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def kv_shape(self) -> KvShape:
        """The shape of this model's KV."""
        return KvShape(self.num_layers, self.num_kv_heads, self.head_dim)

    def kv_layout(self, page_tokens: int) -> KvLayout:
        """The shape of this model's KV cache."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_tokens)


class Fields:
    """Typed access to one JSON object of a checkpoint; every complaint names the file and the field."""

    def __init__(self, path: Path) -> None:
        """Read `path`; raises `CheckpointError` unless it holds one JSON object."""
        self.path = path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
        self.data: dict[str, Any] = data

    def fail(self, name: str, complaint: str) -> CheckpointError:
        """The error to raise about field `name`."""
        return CheckpointError(f"{self.path}: {name}: {complaint}")

    def get(self, name: str) -> Any:
        """The value as it stands, None if it is missing."""
        return self.data.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field must be there."""
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(name, f"expected a positive integer, found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A finite number of at least 0."""
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self.fail(name, f"expected a number, found {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        """true or false; false if missing."""
        value = self.data.get(name)
        if value not in (None, True, False):
            raise self.fail(name, f"expected true or false, found {value!r}")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.data.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.fail(name, f"expected token ids, found {value!r}")
        return tuple(ids)


def read_spec(folder: Path, max_context: int = 0) -> ModelSpec:
    """Read config.json and, if there is one, generation_config.json of `folder`.

    `max_context` > 0 lowers the model's own limit. Raises `CheckpointError` that names the file and the field.
    """
    fields = Fields(folder / "config.json")
    family = _family(fields)
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", f"{head_dim} is odd, rotary embedding needs pairs")
    rope = _rope(fields, head_dim)
    bos = fields.token_ids("bos_token_id")
    return ModelSpec(
        family=family.name,
        num_layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6) or 0.0,
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        max_context=_max_context(fields, family, rope, max_context),
        bos_id=bos[0] if bos else None,
        eos_ids=_eos_ids(folder, fields),
    )


def _family(fields: Fields) -> Family:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.fail("architectures", f"{name!r} is not one of {', '.join(FAMILIES)}")
    for option, supported in REFUSED:
        value = fields.get(option)
        if value is not None and value != supported:
            raise fields.fail(option, f"{value!r} is not supported, only {supported!r}")
    return FAMILIES[name]


def _rope_parameters(fields: Fields) -> dict[str, Any]:
    """One flat dict with `rope_type` and `rope_theta`, from either the new or the old form of config.json."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.fail("rope_parameters", f"expected an object, found {given!r}")
    theta = given.get("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        raise fields.fail("rope_parameters", f"rope_type {kind!r} is not one of {', '.join(KINDS)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.fail("rope_parameters", "partial_rotary_factor is not supported")
    if not isinstance(theta, int | float) or theta <= 1:
        raise fields.fail("rope_theta", f"expected a number above 1, found {theta!r}")
    return {**given, "rope_type": kind, "rope_theta": float(theta)}


def _rope(fields: Fields, head_dim: int) -> Rope:
    parameters = _rope_parameters(fields)
    kind = parameters["rope_type"]
    source = RopeSource(parameters, head_dim, fields.count("max_position_embeddings"))
    try:
        return make_rope(kind, source)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise fields.fail("rope_parameters", f"{kind} needs other values: {error!r}") from error


def _max_context(fields: Fields, family: Family, rope: Rope, wanted: int) -> int:
    limit = fields.count("max_position_embeddings")
    if rope.kind == "yarn":
        # YaRN checkpoints may state the length before stretching (Qwen2.5 does); they serve the stretched length.
        yarn = _rope_parameters(fields)
        limit = max(limit, int(yarn.get("original_max_position_embeddings", limit) * (yarn.get("factor") or 1)))
    window = fields.count("sliding_window", limit) if family.windowed else limit
    if window < limit:
        log.warning("%s: serving %d tokens of context, the sliding window, not %d", fields.path, window, limit)
        limit = window
    if wanted > limit:
        raise fields.fail("max_position_embeddings", f"the model allows {limit} tokens, max_context asks for {wanted}")
    return wanted or limit


def _eos_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, if there is one, and config.json, without repeats."""
    path = folder / "generation_config.json"
    ids = fields.token_ids("eos_token_id")
    if not path.exists():
        return ids
    return tuple(dict.fromkeys((*Fields(path).token_ids("eos_token_id"), *ids)))
