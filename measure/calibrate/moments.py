"""Moments of keys and queries per layer and KV head, over one pass of a model with exact attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model.exact import ExactKv, exact_attend
from hackkv.model.llama import Attend, Llama, flat_positions
from measure.tasks import Ids

CHUNK_TOKENS: Final = 256
LEFT_OUT: Final = 64
"""The first rows of a window that do not count. Attention sinks are there: few rows, unlike all others."""

OnTokens = Callable[[int], None]
"""Called with the number of tokens that the model just read."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one layer, float64."""

    mean: Tensor
    """[Hkv, D]: of k, after the rotary embedding."""
    covariance: Tensor
    """[Hkv, D, D]: of k about its mean."""
    queries: Tensor
    """[Hkv, D, D]: E[q q^T] over the query heads of the group, not about a mean."""


class Sums:
    """Sums over the rows of one layer so far, float64."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.rows = self.query_rows = 0
        self.k = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.kk, self.qq = (torch.zeros(heads, dim, dim, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, q: Tensor, k: Tensor) -> None:
        """Rows q [T, Hq, D] and k [T, Hkv, D]."""
        keys = k.double().transpose(0, 1)
        queries = q.double().unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        self.k += keys.sum(1)
        self.kk += keys.mT @ keys
        self.qq += queries.mT @ queries
        self.rows += keys.shape[1]
        self.query_rows += queries.shape[1]

    def moments(self) -> Moments:
        """Of the rows so far, of which there is at least one."""
        mean = self.k / self.rows
        return Moments(mean, self.kk / self.rows - mean[:, :, None] * mean[:, None], self.qq / self.query_rows)


def gather(model: Llama, windows: tuple[Ids, ...], on_tokens: OnTokens) -> list[Moments]:
    """The moments of every layer. Raises `NonFiniteError` naming the layer whose keys or queries are not finite."""
    spec = model.spec
    sums = [Sums(spec.num_kv_heads, spec.head_dim, model.device) for _ in range(spec.num_layers)]
    for window in windows:
        cache = ExactKv()
        for start in range(0, len(window), CHUNK_TOKENS):
            ids = torch.from_numpy(window[start : start + CHUNK_TOKENS]).to(model.device)
            count = len(ids)
            positions = flat_positions([(start, start + count)], model.device)
            attend = _watching(exact_attend([cache], [count]), sums, max(0, LEFT_OUT - start))
            with torch.inference_mode():
                model.forward(ids, positions, attend, rows=torch.zeros(1, dtype=torch.int64, device=model.device))
            on_tokens(count)
    found = [each.moments() for each in sums]
    for layer, moments in enumerate(found):
        if not all(bool(x.isfinite().all()) for x in (moments.mean, moments.covariance, moments.queries)):
            raise NonFiniteError(f"layer {layer}: a key or query of the text is not finite")
    return found


def _watching(attend: Attend, sums: list[Sums], skipped: int) -> Attend:
    def watch(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if skipped < k.shape[0]:
            sums[layer].add(q[skipped:], k[skipped:])
        return attend(layer, q, k, v)

    return watch


def counted_rows(windows: tuple[Ids, ...]) -> int:
    """Rows that count: all but the first of each window."""
    return sum(max(0, len(window) - LEFT_OUT) for window in windows)
