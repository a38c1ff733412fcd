"""Large models with random weights, and exact attention by torch with which codecs are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from hack_kernels.base import RowKernels
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hackkv.model.config import ModelSpec
from hackkv.model.layout import GATE_UP, QKV, QKV_BIAS, fused_shapes
from hackkv.model.llama import Attend, LayerWeights, Llama, Weights
from hackkv.model.products import ALWAYS
from hackkv.model.rope import Rope, plain


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 128
    qkv_bias: bool = False

    def spec(self, max_context: int) -> ModelSpec:
        """The specification for `Llama`."""
        return ModelSpec(
            family="llama",
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            vocab=self.vocab,
            rms_eps=1e-5,
            rope=Rope("default", 5e5, tuple(plain(5e5, self.head_dim).tolist()), 1.0),
            tie_embeddings=False,
            qkv_bias=self.qkv_bias,
            qk_norm=False,
            max_context=max_context,
            bos_id=None,
            eos_ids=(),
        )


LLAMA: Final = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256)
QWEN: Final = Shape("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, qkv_bias=True)
TINY: Final = Shape("tiny", 1, 64, 4, 1, 64, 64, head_dim=64)


def random_model(shape: Shape, max_context: int, device: torch.device, kernels: RowKernels) -> Llama:
    """A BF16 model. Codecs that fold something into weights do not change their shapes, so nothing is folded here."""
    spec = shape.spec(max_context)

    def drawn(size: tuple[int, ...]) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02)

    made = {name: drawn(size) for name, size in fused_shapes(spec).items()}
    layers = list[LayerWeights]()
    for index in range(spec.num_layers):
        at = f"model.layers.{index}."
        layers.append(
            LayerWeights(
                input_norm=made[at + "input_layernorm.weight"],
                qkv=made[at + QKV],
                qkv_bias=made.get(at + QKV_BIAS),
                qk_norm=None,
                out=made[at + "self_attn.o_proj.weight"],
                ffn_norm=made[at + "post_attention_layernorm.weight"],
                gate_up=made[at + GATE_UP],
                down=made[at + "mlp.down_proj.weight"],
            )
        )
    ends = made["model.embed_tokens.weight"], tuple(layers), made["model.norm.weight"], made["lm_head.weight"]
    return Llama(spec, Weights(*ends), library_rows=ALWAYS, kernels=kernels)


def exact_step(model: Llama, tokens: int, batch: int) -> Callable[[], None]:
    """A step of the model with `batch` sequences over one contiguous cache of `tokens` rows."""
    shape = (model.spec.num_layers, 2, batch, model.spec.num_kv_heads, tokens + 1, model.spec.head_dim)
    cache = torch.randn(shape, dtype=model.dtype, device=model.device)
    ids = torch.full((batch,), 5, device=model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache[layer]
        keys[:, :, -1], values[:, :, -1] = k, v
        return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0].contiguous()

    return partial(_chosen, model, (ids, torch.full_like(ids, tokens)), None, attend)


def exact_prompt(model: Llama, tokens: int) -> Callable[[], None]:
    """A prompt of the model in one pass."""
    ids = torch.arange(tokens, device=model.device) % model.spec.vocab

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()

    positions = torch.arange(tokens, device=model.device)
    return partial(_chosen, model, (ids, positions), positions[-1:], attend)


def _chosen(model: Llama, rows: tuple[Tensor, Tensor], wanted: Tensor | None, attend: Attend) -> None:
    """Compute the most likely tokens after the wanted rows (ids, positions), and bring them to the host."""
    with torch.inference_mode():
        model.logits(model.forward(*rows, attend, wanted)).argmax(-1).tolist()
