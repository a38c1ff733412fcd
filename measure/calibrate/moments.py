"""Moments of keys, queries and values per layer and KV head, over one pass of a model with exact attention.

The rotary embedding rotates rows by their position, and windows are shorter than the contexts to come. So sums are
taken before the embedding. The moments are those that the rows would have if each stood at every position of the
context; moments at the windows' own positions would fit short contexts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.model.exact import ExactKv, exact_attend
from hackkv.model.llama import Attend, Llama, flat_positions, rotation_table
from measure.tasks import Ids

CHUNK_TOKENS: Final = 256
LEFT_OUT: Final = 64
"""The first rows of a window do not count. They hold attention sinks: few rows, unlike all others."""

POSITION_STEP: Final = 7
"""One of so many positions of the context stands for its neighbours."""

OnTokens = Callable[[int], None]
"""Called with the number of tokens that the model just read."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one layer, float64."""

    mean: Tensor
    """[Hkv, D]: mean of k after the rotary embedding, over all positions of the context."""
    covariance: Tensor
    """[Hkv, D, D]: covariance of k."""
    queries: Tensor
    """[Hkv, D, D]: E[q q^T] over the query heads of the group, not about a mean."""
    values: Tensor
    """[Hkv, D, D]: E[v v^T], not about a mean."""


class Sums:
    """Sums over the rows of one layer so far, before the rotary embedding, float64."""

    def __init__(self, heads: int, dim: int, device: torch.device) -> None:
        self.rows = self.query_rows = 0
        self.k = torch.zeros(heads, dim, dtype=torch.float64, device=device)
        self.kk, self.qq, self.vv = (torch.zeros(heads, dim, dim, dtype=torch.float64, device=device) for _ in range(3))

    def add(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> None:
        """Add rows q [T, Hq, D] and k [T, Hkv, D], which `cos_sin` [T, D] has rotated, and v [T, Hkv, D]."""
        values = v.double().transpose(0, 1)
        keys = rotated_back(k.double(), cos_sin).transpose(0, 1)
        queries = rotated_back(q.double(), cos_sin).unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        self.k += keys.sum(1)
        self.kk += keys.mT @ keys
        self.qq += queries.mT @ queries
        self.vv += values.mT @ values
        self.rows += keys.shape[1]
        self.query_rows += queries.shape[1]

    def moments(self, cos_sin: Tensor) -> Moments:
        """The moments of the rows so far (at least one), spread over the positions of `cos_sin` [P, D]."""
        cos, sin = cos_sin.double().chunk(2, dim=-1)
        mean, keys = spread(self.k / self.rows, self.kk / self.rows, cos, sin)
        _, queries = spread(torch.zeros_like(mean), self.qq / self.query_rows, cos, sin)
        return Moments(mean, keys - mean[:, :, None] * mean[:, None], queries, self.vv / self.rows)


def rotated_back(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rows [T, H, D] float64 as they were before the rotary embedding; `cos_sin` [T, D] may scale as well."""
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos + high * sin, high * cos - low * sin), dim=-1) / (cos * cos + sin * sin).repeat(1, 1, 2)


def spread(mean: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and second moment [H, D, D] of rows rotated by every one of the P angles cos, sin [P, D/2]."""
    low, high = mean.chunk(2, dim=-1)
    c, s = cos.mean(0), sin.mean(0)
    cc, cs, ss = (x.mT @ y / len(cos) for x, y in ((cos, cos), (cos, sin), (sin, sin)))
    (aa, ab), (_, bb) = (half.chunk(2, dim=-1) for half in second.chunk(2, dim=-2))
    low_low = cc * aa - cs * ab - cs.mT * ab.mT + ss * bb
    low_high = cc * ab + cs * aa - cs.mT * bb - ss * ab.mT
    high_high = cc * bb + cs * ab.mT + cs.mT * ab + ss * aa
    top, bottom = torch.cat((low_low, low_high), dim=-1), torch.cat((low_high.mT, high_high), dim=-1)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1), torch.cat((top, bottom), dim=-2)


def gather(model: Llama, windows: tuple[Ids, ...], on_tokens: OnTokens) -> list[Moments]:
    """The moments of every layer. Raises `NonFiniteError` naming a layer with a row that is not finite."""
    spec = model.spec
    cos_sin = rotation_table(spec.rope, spec.max_context, model.device)
    sums = [Sums(spec.num_kv_heads, spec.head_dim, model.device) for _ in range(spec.num_layers)]
    read(model, windows, lambda layer, q, k, v, positions: sums[layer].add(q, k, v, cos_sin[positions]), on_tokens)
    found = [each.moments(cos_sin[::POSITION_STEP]) for each in sums]
    for layer, moments in enumerate(found):
        if not all(
            bool(x.isfinite().all()) for x in (moments.mean, moments.covariance, moments.queries, moments.values)
        ):
            raise NonFiniteError(f"layer {layer}: a key or query or value of the text is not finite")
    return found


See = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""(layer, rotated rows of Q, rotated rows of K, rows of V, [T, heads, D] each, their positions [T])."""


def read(model: Llama, windows: tuple[Ids, ...], see: See, on_tokens: OnTokens) -> None:
    """Show every row that counts to `see`, in one pass of the model with exact attention."""
    for window in windows:
        cache = ExactKv()
        for start in range(0, len(window), CHUNK_TOKENS):
            ids = torch.from_numpy(window[start : start + CHUNK_TOKENS]).to(model.device)
            count = len(ids)
            positions = flat_positions([(start, start + count)], model.device)
            left_out = min(count, max(0, LEFT_OUT - start))
            attend = _watching(exact_attend([cache], [count]), see, positions[left_out:])
            with torch.inference_mode():
                model.forward(ids, positions, attend, rows=torch.zeros(1, dtype=torch.int64, device=model.device))
            on_tokens(count)


def _watching(attend: Attend, see: See, positions: Tensor) -> Attend:
    """`attend`, which also shows the last rows of every call, those at `positions`, to `see`."""

    def watch(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if count := len(positions):
            see(layer, q[-count:], k[-count:], v[-count:], positions)
        return attend(layer, q, k, v)

    return watch


def counted_rows(windows: tuple[Ids, ...]) -> int:
    """Rows that count: all but the first `LEFT_OUT` of each window."""
    return sum(max(0, len(window) - LEFT_OUT) for window in windows)
