"""Exact attention over an uncompressed KV cache: the yardstick for tests, baselines and parity with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hackkv.model.llama import Attend, Llama, flat_positions


@dataclass(slots=True)
class ExactKv:
    """K and V of one sequence, rotated, in the model's dtype; rows are appended as they are computed."""

    keys: list[Tensor] = field(default_factory=list)
    """Per layer [rows, Hkv, D]."""
    values: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows that every layer holds."""
        return self.keys[-1].shape[0] if self.keys else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [t, Hkv, D] to `layer`; returns all its rows."""
        if layer == len(self.keys):
            self.keys.append(k.clone())
            self.values.append(v.clone())
        else:
            self.keys[layer] = torch.cat((self.keys[layer], k))
            self.values[layer] = torch.cat((self.values[layer], v))
        return self.keys[layer], self.values[layer]


def exact_attend(caches: Sequence[ExactKv], lengths: Sequence[int]) -> Attend:
    """Causal attention for a ragged batch: the next `lengths[i]` rows belong to `caches[i]` and are appended to it."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        start = 0
        for cache, length in zip(caches, lengths, strict=True):
            rows = slice(start, start + length)
            keys, values = cache.append(layer, k[rows], v[rows])
            out[rows] = causal(q[rows], keys, values)
            start += length
        return out

    return attend


def causal(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for the last t of S positions: q [t, Hq, D]; keys, values [S, Hkv, D] -> [t, Hq, D].

    Scores, weights and sums are float32 whatever the inputs are.
    """
    queries, kv_heads, rows = q.shape[0], keys.shape[1], keys.shape[0]
    group = q.shape[1] // kv_heads
    wide_q = q.float().view(queries, kv_heads, group, -1)
    scores = torch.einsum("tkgd,skd->kgts", wide_q, keys.float()) * q.shape[-1] ** -0.5
    last = torch.arange(rows - queries, rows, device=q.device)[:, None]
    scores.masked_fill_(torch.arange(rows, device=q.device) > last, -torch.inf)
    mixed = torch.einsum("kgts,skd->tkgd", F.softmax(scores, dim=-1), values.float())
    return mixed.reshape(q.shape).to(q.dtype)


def advance(model: Llama, batch: Sequence[tuple[ExactKv, Sequence[int]]]) -> Tensor:
    """Run the next tokens of several sequences at once; returns hidden [T, hidden] and grows the caches."""
    lengths = [len(ids) for _, ids in batch]
    spans = [(cache.tokens, cache.tokens + len(ids)) for cache, ids in batch]
    ids = torch.tensor([token for _, tokens in batch for token in tokens], device=model.device)
    return model.forward(ids, flat_positions(spans, model.device), exact_attend([kv for kv, _ in batch], lengths))


def greedy(model: Llama, prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """The most likely next token, `tokens` times, with exact attention: a reference run."""
    cache, out, step = ExactKv(), list[int](), list(prompt_ids)
    for _ in range(tokens):
        hidden = advance(model, [(cache, step)])
        step = [int(model.logits(hidden[-1:]).argmax())]
        out += step
    return out
