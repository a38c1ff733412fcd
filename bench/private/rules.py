"""MPCache's rules over arrays of any library with numpy's names: which rows stay, and which clusters a query reads.

The same functions run on numpy in the clear and, traced by jax, on secret shares: no branch and no shape depends on a
value. A choice is made by comparisons, and its result is a matrix of zeros and ones. The rules are those of codec
`mpcache` (`hackkv.codecs.retention`, `hackkv.codecs.selecting`); `tests/bench/test_private.py` compares the two.
Sources: MPCache (arXiv 2501.06807) §4.2 to §4.4, Eq. 2, Algorithm 3.

`xp` is numpy or jax.numpy. A *cluster* is a page of the codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Array = Any
"""An array of numpy or of jax.numpy."""
OWN_LAYERS: Final = 2
"""Number of first layers that choose by themselves (§4.4)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Percentages are of a prompt's rows, or of its clusters. Settings of codec `mpcache` have the same names."""

    budget: int = 25
    first: int = 4
    last: int = 16
    voters: int = 20
    select: int = 25
    least: int = 4
    alpha: float = 0.6
    page_tokens: int = 8

    def held(self, tokens: int) -> int:
        """Rows of a prompt that stay."""
        return min(tokens, max(1, _share(tokens, self.budget), self.first + min(tokens, self.last)))

    def read(self, clusters: int) -> int:
        """How many of `clusters` clusters a query reads."""
        return min(clusters, max(self.least, _share(clusters, self.select)))

    def chooses(self, clusters: int) -> bool:
        """Whether a query leaves out any cluster."""
        return self.read(clusters) < clusters

    def pairs_read(self, clusters: int) -> int:
        """Pairs of clusters that pass the first level; all of them if half of the clusters or more are read."""
        pairs = -(-clusters // 2)
        return pairs if self.select >= 50 else min(pairs, max(2, -(-pairs // 2)))

    def voters_of(self, tokens: int) -> int:
        """Number of last queries of a prompt whose attention chooses rows."""
        return _share(tokens, self.voters)

    def chooser(self, layer: int) -> int:
        """The layer whose choice `layer` shares."""
        return layer - layer % 2 if layer >= OWN_LAYERS else layer


def _share(number: int, percent: int) -> int:
    return -(-number * percent // 100)


def best(xp: Any, scores: Array, number: int) -> Array:
    """Zeros and ones [..., n] that mark the `number` largest of `scores` [..., n]. Of equal scores the earlier win.

    All pairs are compared at once: n² comparisons, but only as many rounds as one comparison takes.
    """
    return _flag(xp, _places(xp, scores) < number)


def picked(xp: Any, scores: Array, number: int) -> Array:
    """Zeros and ones [..., number, n], one 1 in each row: row i marks the (i + 1)-th largest of `scores`."""
    return _flag(xp, _places(xp, scores)[..., None, :] == xp.arange(number)[:, None])


def packed(xp: Any, kept: Array, number: int) -> Array:
    """Zeros and ones [..., number, n] that move the `number` ones of `kept` [..., n] to the front, in their order."""
    at = xp.arange(kept.shape[-1])
    before = xp.matmul(kept, _flag(xp, at[:, None] < at))  # how many are kept before each
    return _flag(xp, before[..., None, :] == xp.arange(number)[:, None]) * kept[..., None, :]


def kept_rows(xp: Any, rules: Rules, votes: Array) -> Array:
    """Zeros and ones [Hkv, T]: the rows of a prompt that stay, by `votes` [Hkv, T]."""
    tokens = votes.shape[-1]
    held = rules.held(tokens)
    first = min(rules.first, held)
    last = min(rules.last, held - first)
    middle = best(xp, votes[:, first : tokens - last], held - first - last)
    ends = xp.ones_like(votes, dtype=xp.int32)
    return xp.concatenate((ends[:, :first], middle, ends[:, tokens - last :]), -1)


def bounds(xp: Any, rules: Rules, keys: Array) -> tuple[Array, Array]:
    """Bounds with which a query is compared: of pairs [Hkv, pairs, D], and of clusters [Hkv, clusters, D]. They are
    α r_max + (1 - α) r_min (Eq. 2) of `keys` [Hkv, clusters * page_tokens, D].
    """
    heads, rows, dim = keys.shape
    clusters = keys.reshape(heads, rows // rules.page_tokens, rules.page_tokens, dim)
    most, least = xp.max(clusters, axis=2), xp.min(clusters, axis=2)
    evened = [xp.concatenate((each, each[:, -1:]), 1) if each.shape[1] % 2 else each for each in (most, least)]
    halves = [each.reshape(heads, -1, 2, dim) for each in evened]
    of_pairs = rules.alpha * xp.max(halves[0], axis=2) + (1 - rules.alpha) * xp.min(halves[1], axis=2)
    return of_pairs, rules.alpha * most + (1 - rules.alpha) * least


def chosen(xp: Any, rules: Rules, q: Array, of_pairs: Array, of_clusters: Array) -> Array:
    """Zeros and ones [Hkv, read - 2, clusters - 2]: the clusters between the ends that `q` [Hkv, G, D] reads.

    Call it only if some are left out. Raises `ValueError` if fewer clusters pass the first level than are to be read.
    """
    clusters = of_clusters.shape[1]
    read, pairs, through = rules.read(clusters), of_pairs.shape[1], rules.pairs_read(clusters)
    if clusters % 2 or 2 * through < read:
        raise ValueError(f"select: {read} of {clusters} clusters cannot be chosen by way of {through} pairs")
    query = xp.sum(q, axis=1)[:, :, None]
    alike = xp.matmul(of_clusters, query)[..., 0]
    eye = xp.eye(clusters - 2, dtype=xp.int32) + xp.zeros((q.shape[0], 1, 1), dtype=xp.int32)
    if through < pairs:
        by_pair = picked(xp, xp.matmul(of_pairs, query)[:, 1:-1, 0], through - 2)
        # Pair j between the ends has the clusters of columns 2j + 1 and 2j + 2 between the ends.
        inner = xp.stack(
            [xp.kron(xp.eye(pairs - 2, dtype=xp.int32), xp.eye(2, dtype=xp.int32)[i : i + 1]) for i in (0, 1)]
        )
        pass_on = xp.matmul(by_pair[:, None], inner[None]).reshape(q.shape[0], -1, 2 * (pairs - 2))
        rest = xp.pad(pass_on, ((0, 0), (0, 0), (1, 1)))
        candidates = xp.concatenate((eye[:, :1], rest, eye[:, -1:]), 1)
        alike_there = xp.matmul(candidates.astype(xp.float32), alike[:, 1:-1, None])[..., 0]
    else:
        candidates, alike_there = eye, alike[:, 1:-1]
    return xp.matmul(picked(xp, alike_there, read - 2), candidates)


def _places(xp: Any, scores: Array) -> Array:
    """For each of `scores` [..., n], how many are larger, or equal and earlier."""
    at = xp.arange(scores.shape[-1])
    larger = _flag(xp, scores[..., None, :] > scores[..., :, None])
    beaten = xp.where(at[None, :] > at[:, None], larger, 1 - xp.swapaxes(larger, -1, -2))
    return xp.sum(xp.where(at[None, :] == at[:, None], xp.zeros_like(beaten), beaten), axis=-1)


def _flag(xp: Any, true: Array) -> Array:
    """1 where `true`, else 0, as integers, since products of fractions are not exact on shares."""
    return true.astype(xp.int32)
