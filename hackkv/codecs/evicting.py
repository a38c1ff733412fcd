"""Evictions: a prompt's cache shrinks to the rows that are worth most before it travels, in pages of any codec.

For every row of a prompt, a prefill node notes what the choice needs (`Pool.notes`): K and V in FP16, and the votes
so far. When all rows are computed, the rows that stay are sealed as if they were a shorter prompt. Pages, windows and
bytes are those of the codec beneath, which knows nothing of evictions. Decode evicts nothing. Rotary embeddings stay
as they are, so positions run on behind the prompt's last token (`Span.evicted`).
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from hack_kernels.base import Plane, Pool
from torch import Tensor

from hackkv.batch import Batch, Span
from hackkv.codecs.paged import PagedCodec, write_exact_rows
from hackkv.codecs.retention import Retention
from hackkv.packing import on_device

ROWS: Final = ("rows_k", "rows_v")
"""Notes: K and V as they came."""


class Evicting:
    """Implements `Eviction` over the pages of a codec."""

    def __init__(self, codec: PagedCodec, retention: Retention) -> None:
        self._codec, self._retention = codec, retention
        (dim,) = {fmt.head_dim for fmt in codec.formats}
        pi = codec.page_tokens
        self.notes = (
            *(Plane(name, torch.float16, (pi, dim)) for name in ROWS),
            Plane("votes", torch.int64, (pi,)),
            Plane("earlier_votes", torch.int64, (pi,)),
            Plane("counted", torch.int64, ()),
        )

    def rows_held(self, tokens: int) -> int:
        """The number of rows that the settings leave of a prompt of `tokens` tokens."""
        return self._retention.rows_held(tokens)

    def observe(self, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Note the rows of prompts that will lose some, and the votes of the queries that have one."""
        offset = 0
        for index, span in enumerate(batch.spans):
            part = slice(offset, offset + span.count)
            offset += span.count
            if self.rows_held(span.prompt) < span.prompt:
                self._note(pool, batch.where.table[index], span, q[part], (k[part], v[part]))

    def evict(self, layer: int, pools: tuple[Pool, ...], span: Span) -> None:
        """Seal the rows that stay as if they were the whole prompt."""
        tokens, held, pool = span.count, self.rows_held(span.count), pools[layer]
        if held == tokens:
            return
        pi, codec = pool.page_tokens, self._codec
        (pages,) = on_device([span.pages[: -(-tokens // pi)]], pool.device)
        votes = pools[self._retention.chooser(layer)].notes["votes"][pages]
        stay = self._retention.choose(votes.transpose(0, 1).flatten(1)[:, :tokens])
        heads = torch.arange(pool.num_kv_heads, device=pool.device)[:, None]
        k, v = (pool.notes[name][pages[stay // pi], heads, stay % pi].transpose(0, 1).contiguous() for name in ROWS)
        batch = Batch.of([Span(span.slot, 0, held, span.pages)], pi, pool.device)
        codec.seal(layer, pool, batch, (k, v))
        write_exact_rows(pool, batch, k, v)

    def _note(self, pool: Pool, table: Tensor, span: Span, q: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        """`table` [Pmax] are the pages of the span's sequence; q [n, Hq, D], rows [n, Hkv, D] float16."""
        pi, notes, end = pool.page_tokens, pool.notes, span.held + span.count
        at = torch.arange(span.held, end, device=pool.device)
        for name, x in zip(ROWS, rows, strict=True):
            notes[name][table[at // pi], :, at % pi] = x
        begin = span.prompt - self._retention.voters_of(span.prompt)
        first = max(span.held, begin)
        if first >= end:
            return
        pages = table[: -(-end // pi)]
        keys = notes["rows_k"][pages].transpose(0, 1).flatten(1, 2)[:, :end]
        votes = self._codec.rows.votes(q[first - span.held :], keys, first)
        # A pass may be repeated. The votes before it are kept, so those of its own queries count once.
        repeated = notes["counted"][pages[:1], :, None] == first
        before = torch.where(repeated, notes["earlier_votes"][pages], notes["votes"][pages])
        known = 0 if first == begin else span.held
        places = torch.arange(len(pages) * pi, device=pool.device).view(-1, 1, pi)
        before = before.masked_fill(places >= known, 0)
        added = F.pad(votes, (0, len(pages) * pi - end)).unflatten(1, (-1, pi)).transpose(0, 1)
        notes["earlier_votes"][pages], notes["votes"][pages] = before, before + added
        notes["counted"][pages[:1]] = first
