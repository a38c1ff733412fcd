"""Votes by which evictions choose rows: the attention that rows of a prompt get from some of its queries.

a_t = Σ_i Σ_g softmax_i(q_ig · k / √D)_t over queries i, causal, and the query heads g that share a KV head: the
accumulated attention of H2O (arXiv 2306.14048, Alg. 1), which SnapKV (arXiv 2404.14469, Eq. 1) and MPCache (§4.2)
take from the last queries only. Keys are the FP16 rows, whatever form they rest in.

Votes are integers. Scores are computed in FP64, and weights are rounded to a fixed grid. Sums of weights are exact, in
FP64 as long as they stay below 2^53, so they do not depend on their order. So the same rows get the same votes for any
chunking, batch or number of threads.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

WEIGHT_BITS: Final = 30
"""A weight of 1 counts 2**30: 2**33 weights of a row fit 64 bits."""
BLOCK: Final = 2**21
"""Weights that are held at once."""


def attention_mass(q: Tensor, keys: Tensor, first: int) -> Tensor:
    """Votes [Hkv, T] int64 of queries q [n, Hq, D], which are rows first.., for keys [Hkv, T, D], the rows 0..T-1."""
    heads, total, dim = keys.shape
    group = q.shape[1] // heads
    queries = q.double().unflatten(1, (heads, group)).permute(1, 0, 2, 3) / math.sqrt(dim)  # [Hkv, n, G, D]
    columns = keys.double().mT
    at, votes = torch.arange(total, device=keys.device), torch.zeros_like(keys[..., 0], dtype=torch.int64)
    rows = max(1, BLOCK // (heads * group * total))
    for start in range(first, first + q.shape[0], rows):
        block = queries[:, start - first : start - first + rows]
        end = start + block.shape[1]
        weights = (block.flatten(1, 2) @ columns[..., :end]).unflatten(1, (-1, group))  # [Hkv, rows, G, end]
        own = at[start:end]
        weights[..., start:].masked_fill_(own > own[:, None, None], -math.inf)
        # In place: a block is larger than the caches, and each new tensor would be written and read again.
        weights.sub_(weights.amax(-1, keepdim=True)).exp_().mul_(2.0**WEIGHT_BITS).round_()
        sums = weights.sum(-1, keepdim=True)
        weights.mul_(2.0**WEIGHT_BITS).div_(sums).floor_()
        votes[:, :end] += weights.sum((1, 2)).long()
    return votes
