"""SmolLM2-135M-Instruct from its GGUF as plain float32 tensors, with an `attend` that sees quantized pages.

The open-page rule: a query of page p sees page p, the `recent` pages before it and the first `sink` pages exactly, and
every other page as its format leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hackkv.model.shipped import smollm2
from lab.frontier.quant import FP16_BYTES, PAGE, Quantizer, Tok

CONTEXT: Final = 8192
CHUNK: Final = 256
"""Tokens whose logits are compared at a time."""

Watch = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with layer, q [Hq, T, D], k and v [Hkv, T, D]; q and k are rotated."""


@dataclass(frozen=True)
class Rounding:
    """What a kernel also rounds: queries, in the basis of the codes, to int8; weights to 0..127 per page and query."""

    k: Tok
    v: Tok


@dataclass(frozen=True)
class Kv:
    """A format: K and V (None: FP16), the pages that stay exact, and the rounding of q and P (None: not rounded)."""

    name: str
    k: Quantizer | None
    v: Quantizer | None
    sink: int = 1
    recent: int = 1
    rounding: Rounding | None = None

    def token_bytes(self, layers: int, dim: int) -> float:
        """Bytes per token and KV head, mean over the layers, without exact pages. FP16 has 4 * dim."""
        rows = (
            side.row_bytes(i, dim) if side else FP16_BYTES * dim for side in (self.k, self.v) for i in range(layers)
        )
        return sum(rows) / layers


class Model:
    """The forward pass; `layers` holds plain tensors. Raises `CheckpointError` if SmolLM2 is not installed."""

    def __init__(self) -> None:
        file = smollm2()
        self._tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        hf = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        c = hf.config
        self.hq, self.hkv, self.eps = c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
        self.d = c.hidden_size // self.hq
        w = {name: p.detach() for name, p in hf.state_dict().items()}
        self.embed, self.final = w["model.embed_tokens.weight"], w["model.norm.weight"]
        self.head = w.get("lm_head.weight", self.embed)
        self.layers = [layer_of(w, f"model.layers.{i}.") for i in range(c.num_hidden_layers)]
        theta = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
        self.cos_sin = rotation(self.d, float(theta))

    def ids(self, text: str) -> Tensor:
        """Token ids of a text, int64 [T]."""
        return torch.tensor(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def hidden(self, ids: Tensor, kv: Kv | None = None, watch: Watch | None = None) -> Tensor:
        """Final hidden states [T, hidden]; T is a multiple of the page. Without `kv` attention is exact."""
        x, t = self.embed[ids], ids.shape[0]
        cos_sin = self.cos_sin[:t]
        for index, w in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(x, x.shape[-1:], w["in"], self.eps), w["qkv"])
            q, k, v = qkv.view(t, -1, self.d).transpose(0, 1).split((self.hq, self.hkv, self.hkv))
            q, k, v = rotate(q, cos_sin), rotate(k, cos_sin), v.contiguous()
            if watch:
                watch(index, q, k, v)
            x = x + F.linear(attend(index, q, k, v, kv or Kv("exact", None, None)), w["o"])
            g, u = F.linear(F.rms_norm(x, x.shape[-1:], w["post"], self.eps), w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(g) * u, w["down"])
        return F.rms_norm(x, x.shape[-1:], self.final, self.eps)


def layer_of(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of a layer; matrices with the same input are joined."""
    return {
        "in": w[f"{prefix}input_layernorm.weight"],
        "qkv": torch.cat([w[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"]),
        "o": w[f"{prefix}self_attn.o_proj.weight"],
        "post": w[f"{prefix}post_attention_layernorm.weight"],
        "gate_up": torch.cat([w[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        "down": w[f"{prefix}mlp.down_proj.weight"],
    }


def rotation(dim: int, theta: float) -> Tensor:
    """[CONTEXT, dim]: cosines, then sines, of each pair of channels."""
    angles = torch.arange(CONTEXT)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE of [H, T, D] by `cos_sin` [T, D], in halves."""
    (a, b), (cos, sin) = x.chunk(2, -1), cos_sin.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, kv: Kv) -> Tensor:
    """Causal attention [T, Hq * D] by the open-page rule, for q [Hq, T, D] and k, v [Hkv, T, D]."""
    hq, t, d = q.shape
    q = q.view(k.shape[0], -1, t, d) / math.sqrt(d)
    kq, vq = kv.k(layer, k) if kv.k else k, kv.v(layer, v) if kv.v else v
    qi = rounded_queries(layer, q, kv.rounding.k) if kv.rounding else q
    scales = kv.rounding.v.codes(layer, v)[1][..., 0] if kv.rounding else None
    out = torch.empty_like(q)
    mask = torch.full((PAGE, PAGE), -torch.inf).triu(1)
    for start, end in pairwise(range(0, t + 1, PAGE)):
        first = kv.sink * PAGE
        last = max(first, start - kv.recent * PAGE)
        keys, values = k[:, :end].clone(), v[:, :end].clone()
        keys[:, first:last], values[:, first:last] = kq[:, first:last], vq[:, first:last]
        rows = q[:, :, start:end]
        scores = rows @ keys[:, None].mT
        if kv.rounding:
            scores[..., first:last] = qi[:, :, start:end] @ kq[:, None, first:last].mT
        scores[..., start:] += mask
        weights = scores.softmax(-1)
        if scales is not None and last > first:
            weights[..., first:last] = rounded_weights(weights[..., first:last], scales[:, None, None, first:last])
        out[:, :, start:end] = weights @ values[:, None]
    return out.view(hq, t, d).transpose(0, 1).reshape(t, -1)


def rounded_queries(layer: int, q: Tensor, k: Tok) -> Tensor:
    """q [Hkv, group, T, D] after coding to int8 in the basis of K's codes, rotated back."""
    coded = q @ k.back[layer].mT[:, None]
    step = coded.abs().amax(-1, keepdim=True) / 127
    return (coded / step).round() * step @ k.to[layer].mT[:, None]


def rounded_weights(weights: Tensor, scales: Tensor) -> Tensor:
    """Weights [..., N * PAGE] after coding to 0..127 with V's scales folded in, one step per page and query."""
    folded = (weights * scales).unflatten(-1, (-1, PAGE))
    step = folded.amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return torch.flatten((folded / step).round() * step, -2) / scales


@dataclass(frozen=True)
class Score:
    """Mean KL to the exact model in nats per token, perplexities, share of equal top-1."""

    kl: float
    ppl: float
    exact_ppl: float
    top1: float


@torch.inference_mode()
def compare(model: Model, ids: Tensor, exact: Tensor, other: Tensor) -> Score:
    """Scores of final hidden states [T, hidden] against exact ones."""
    kl = nll = exact_nll = same = 0.0
    t = ids.shape[0]
    for a in range(0, t, CHUNK):
        p = F.linear(exact[a : a + CHUNK], model.head).log_softmax(-1)
        r = F.linear(other[a : a + CHUNK], model.head).log_softmax(-1)
        same += (p.argmax(-1) == r.argmax(-1)).sum().item()
        target = ids[a + 1 : a + CHUNK + 1, None]
        nll -= r[: len(target)].gather(1, target).sum().item()
        exact_nll -= p[: len(target)].gather(1, target).sum().item()
        kl += (p.exp() * (p - r)).sum().item()
    return Score(kl / t, math.exp(nll / (t - 1)), math.exp(exact_nll / (t - 1)), same / t)
