"""Names and shapes of the tensors of a checkpoint, in two forms.

*Split* is Hugging Face's form. *Fused* is the form in which the model computes: Q, K and V are one matrix, the two
halves of the feed-forward another. A fused file is our own, written into our cache and never changed after that, so
processes map it instead of copying it, and share its memory.
"""

from __future__ import annotations

from hackkv.model.config import ModelSpec

Shapes = dict[str, tuple[int, ...]]

FUSED = {"format": "pt", "hackkv.form": "fused"}
"""Metadata of a safetensors file in fused form."""

QKV, QKV_BIAS, GATE_UP = "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "mlp.gate_up_proj.weight"
PARTS = {
    QKV: tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    QKV_BIAS: tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    GATE_UP: ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
"""Tensor of a layer in fused form -> the split tensors whose rows it holds, in this order."""


def split_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor that a checkpoint of this shape must hold, by its Hugging Face name."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: Shapes = {
        "input_layernorm.weight": (spec.hidden,),
        "post_attention_layernorm.weight": (spec.hidden,),
        "self_attn.q_proj.weight": (q, spec.hidden),
        "self_attn.k_proj.weight": (kv, spec.hidden),
        "self_attn.v_proj.weight": (kv, spec.hidden),
        "self_attn.o_proj.weight": (spec.hidden, q),
        "mlp.gate_proj.weight": (spec.ffn, spec.hidden),
        "mlp.up_proj.weight": (spec.ffn, spec.hidden),
        "mlp.down_proj.weight": (spec.hidden, spec.ffn),
    }
    if spec.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    if spec.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def fused_parts(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Every tensor of the fused form -> the split tensors whose rows it holds, in this order."""
    owner = {part: name for name, parts in PARTS.items() for part in parts}
    found = dict[str, tuple[str, ...]]()
    for name in split_shapes(spec):
        prefix, leaf = _leaf(name)
        fused = owner.get(leaf)
        if fused is None:
            found[name] = (name,)
        else:
            found[prefix + fused] = tuple(prefix + part for part in PARTS[fused])
    return found


def fused_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the fused form."""
    split = split_shapes(spec)
    return {
        name: (sum(split[part][0] for part in parts), *split[parts[0]][1:]) for name, parts in fused_parts(spec).items()
    }


def _leaf(name: str) -> tuple[str, str]:
    """`model.layers.3.` and the rest of a layer's tensor; nothing and the whole name of any other."""
    pieces = name.split(".", 3)
    return (".".join(pieces[:3]) + ".", pieces[3]) if pieces[1] == "layers" else ("", name)
