"""Votes by which evictions choose rows: the attention that rows of a prompt get from some of its queries.

a_t = Σ_i Σ_g softmax_i(q_ig · k / √D)_t over queries i, causal, and the query heads g that share a KV head: the
accumulated attention of H2O (arXiv 2306.14048, Alg. 1), which SnapKV (arXiv 2404.14469, Eq. 1) and MPCache (§4.2)
take from the last queries only. Keys are the FP16 rows, whatever form they rest in.

Votes are integers, so their sums do not depend on the order of queries, nor on chunks of a prompt, batches or threads.
The definition computes scores in FP64 and rounds weights to a fixed grid, whose sums are exact too. C++ (`vote.h`)
computes both in FP32, every sum in one order, and rounds what each key gets: its votes differ by some 10^-6 of a vote.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch
from torch import Tensor

VOTE_BITS: Final = 30
"""A weight of 1 counts 2**30: 2**33 weights of a row fit 64 bits."""
BLOCK: Final = 2**21
"""Weights that are held at once."""


class VoteKernels(Protocol):
    """Operations for evictions."""

    def votes(self, q: Tensor, keys: Tensor, first: int) -> Tensor:
        """Votes [Hkv, T] int64 of queries q [n, Hq, D], which are rows first.., for keys [Hkv, T, D] float16, the rows
        0..T-1."""
        ...


class Voting:
    """Implements `VoteKernels` on any device."""

    def votes(self, q: Tensor, keys: Tensor, first: int) -> Tensor:
        """Block by block, in torch."""
        heads, total, dim = keys.shape
        group = q.shape[1] // heads
        queries = q.double().unflatten(1, (heads, group)).permute(1, 0, 2, 3) / math.sqrt(dim)  # [Hkv, n, G, D]
        columns = keys.double().mT
        at, found = torch.arange(total, device=keys.device), torch.zeros_like(keys[..., 0], dtype=torch.int64)
        rows = max(1, BLOCK // (heads * group * total))
        for start in range(first, first + q.shape[0], rows):
            block = queries[:, start - first : start - first + rows]
            end = start + block.shape[1]
            weights = (block.flatten(1, 2) @ columns[..., :end]).unflatten(1, (-1, group))  # [Hkv, rows, G, end]
            own = at[start:end]
            weights[..., start:].masked_fill_(own > own[:, None, None], -math.inf)
            # In place: a block is larger than the caches, and each new tensor would be written and read again.
            weights.sub_(weights.amax(-1, keepdim=True)).exp_().mul_(2.0**VOTE_BITS).round_()
            sums = weights.sum(-1, keepdim=True)
            weights.mul_(2.0**VOTE_BITS).div_(sums).floor_()
            found[:, :end] += weights.sum((1, 2)).long()
        return found
