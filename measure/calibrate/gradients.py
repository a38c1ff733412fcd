"""Gradients of the loss with respect to keys and values, as weights for the errors of a codec's levels (`levels.py`).

The model that serves keeps no graph: its kernels write in place. So the same pass is repeated here in torch. The pass
up keeps only the input of each layer. The pass down computes a layer again and drops its graph when its gradients are
known, so memory is that of one layer's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from hack_kernels.block_weight import as_numbers
from hack_kernels.nuq_format import rotated
from torch import Tensor

from hackkv.model.llama import LayerWeights, Llama, rotation_table
from measure.calibrate.moments import LEFT_OUT, OnTokens
from measure.tasks import Ids

LOSS_ROWS: Final = 256
"""Rows whose logits are in memory at a time."""

SeeGradients = Callable[[int, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], None]
"""(layer, rotated rows of K, rows of V, their positions [T], the loss's gradients with respect to both). Rows and
gradients are float32 [T, Hkv, D]."""


def read_gradients(model: Llama, windows: tuple[Ids, ...], see: SeeGradients, on_tokens: OnTokens) -> None:
    """Show every row that counts to `see`, layers last to first, in a pass up and down of each window.

    The loss is the sum of -log p(next token) over the window, with exact attention.
    """
    for window in windows:
        ids = torch.from_numpy(window).to(model.device)
        positions = torch.arange(len(ids), device=model.device)
        cos_sin = rotation_table(model.spec.rope, len(ids), model.device)
        inputs = [as_numbers(model.weights.embed)[ids].float()]
        with torch.no_grad():
            for layer in model.weights.layers:
                inputs.append(_layer(model, layer, inputs[-1], cos_sin)[0])
        down = loss_gradient(model, inputs.pop(), ids)
        for index in reversed(range(model.spec.num_layers)):
            x = inputs.pop().requires_grad_()
            with torch.enable_grad():
                out, k, v = _layer(model, model.weights.layers[index], x, cos_sin)
                down, of_k, of_v = torch.autograd.grad(out, (x, k, v), down)
            rows = slice(min(LEFT_OUT, len(ids)), None)
            see(index, k.detach()[rows], v.detach()[rows], positions[rows], (of_k[rows], of_v[rows]))
        on_tokens(len(ids))


def loss_gradient(model: Llama, hidden: Tensor, ids: Tensor) -> Tensor:
    """Gradient of the loss of the next tokens with respect to `hidden` [T, hidden], the last layer's output."""
    head, norm = as_numbers(model.weights.lm_head).float(), model.weights.final_norm.float()
    parts = list[Tensor]()
    for at in range(0, len(ids), LOSS_ROWS):
        rows = hidden[at : at + LOSS_ROWS].detach().requires_grad_()
        following = ids[at + 1 : at + 1 + LOSS_ROWS]
        with torch.enable_grad():
            logits = F.linear(_norm(rows, norm, model.spec.rms_eps), head)[: len(following)]
            loss = F.cross_entropy(logits, following, reduction="sum")
            parts.append(torch.autograd.grad(loss, rows)[0])
    return torch.cat(parts)


def _layer(model: Llama, layer: LayerWeights, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output [T, hidden], rotated K, V) of a layer for rows x, float32 [T, hidden], of a sequence from position 0."""
    spec, count = model.spec, len(x)
    num_rotated = spec.num_heads + spec.num_kv_heads
    bias = None if layer.qkv_bias is None else layer.qkv_bias.float()
    qkv = F.linear(_norm(x, layer.input_norm.float(), spec.rms_eps), as_numbers(layer.qkv).float(), bias)
    qk, v = qkv.view(count, -1, spec.head_dim).split((num_rotated, spec.num_kv_heads), dim=1)
    if layer.qk_norm is not None:
        qk = F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps) * layer.qk_norm.float()
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    q, k = rotated(qk, cos, sin).split((spec.num_heads, spec.num_kv_heads), dim=1)
    group = spec.num_heads // spec.num_kv_heads
    wide_k, wide_v = (each.repeat_interleave(group, 1) for each in (k, v))
    q, wide_k, wide_v = (each.transpose(0, 1)[None] for each in (q, wide_k, wide_v))
    mixed = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = x + F.linear(mixed, as_numbers(layer.out).float())
    both = F.linear(_norm(x, layer.ffn_norm.float(), spec.rms_eps), as_numbers(layer.gate_up).float())
    gate, up = both.chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, as_numbers(layer.down).float()), k, v


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)
