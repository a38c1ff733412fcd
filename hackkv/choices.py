"""Choices of a codec: it may evict rows of a prompt once it is computed, and leave out pages that decode would read."""

from __future__ import annotations

from typing import Protocol

from hack_kernels.base import Plane, Pool, Spans
from torch import Tensor

from hackkv.batch import Batch, Span


class Eviction(Protocol):
    """Evicts rows of a prompt once all of them are computed, before its KV leaves the prefill node.

    The number of rows that stay depends on the prompt's length alone, so that a decode node can reserve room for them
    beforehand. Which rows stay may depend on anything.
    """

    notes: tuple[Plane, ...]
    """Notes of a page of one KV head, made while its prompt is computed (`Pool.notes`)."""

    def rows_held(self, tokens: int) -> int:
        """The number of rows that stay of a prompt of `tokens` tokens, at least 1."""
        ...

    def observe(self, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Note what the choice needs to know of a batch's rows, for spans with a `prompt`. A repeat changes nothing.

        q [T, Hq, D]; k, v [T, Hkv, D] float16, all in the form in which the codec attends to them.
        """
        ...

    def evict(self, layer: int, pools: tuple[Pool, ...], span: Span) -> None:
        """Move the rows of a layer that stay, in order, to the beginning of the pages of `span` and to its slot.

        `span` covers the whole prompt: `held` is 0. Afterwards its first `rows_held(span.count)` rows count. `pools`
        are those of all layers, with the notes of this prompt. A repeat changes nothing.
        """
        ...


class Selection(Protocol):
    """Chooses the pages that decode reads."""

    def visible(self, layer: int, pool: Pool, batch: Batch, q: Tensor) -> Spans:
        """The pages that the queries q [B, Hq, D] of a decode batch attend to: equally many for each KV head."""
        ...


def some_pages(where: Spans, page_tokens: int, table: Tensor, counts: Tensor) -> Spans:
    """`where` of a decode batch, but with the sealed pages of `table` alone; the own page stays visible.

    `table` [B, P] or [B, Hkv, P] int64 lists pool indices; the first `counts` [B] int64 of each list are valid. Kernels
    number the rows that a query sees, so to them the sequence holds these pages and its own page only.
    """
    starts = counts * page_tokens + where.starts % page_tokens
    return Spans(starts, where.counts, where.offsets, table, where.slots)
