"""Decode reads some of the pages that a sequence holds. Each KV head chooses its own (MPCache, arXiv 2501.06807, §4.3).

A page is the paper's cluster. Eq. 2 scores it for a query q: Sim = Σ_d q_d (α r_max,d + (1 - α) r_min,d). Here r_max
and r_min are the largest and the least value of each channel of the page's keys, and q is the sum of the query heads
that share a KV head. Pages are chosen in two levels. If less than half of the pages is to be read, the better half of
the pairs of pages stays. Of the pages that are left, those with the best scores are read. The first and the last page
are always read, and so is the open one. With `pairs`, layers 2 and 3, 4 and 5 and so on read the same pages: the even
layer chooses (§4.4).

Rows of prompts see all pages. Decode that leaves pages out makes other K and V of later rows. So a replay runs one row
after the other, as decode did (`KvCodec.decodes_as_prefill`).
"""

from __future__ import annotations

import torch
from hack_kernels.base import Pool, Spans
from hack_kernels.bounded import LEAST, MOST, BoundedFormat, BoundedKernels
from pydantic import Field
from torch import Tensor

from hackkv.batch import Batch
from hackkv.choices import some_pages
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.codecs.retention import Amount, Retention, Rows
from hackkv.config import Frozen


class SelectionSettings(Frozen):
    """Settings of a selection; every one is part of the fingerprint."""

    select: Rows = Amount(percent=100)
    """Pages of a sequence that decode reads."""
    least: int = Field(default=8, ge=2)
    """A sequence of at most this many pages is read whole: choosing would cost more than it saves."""
    alpha: float = Field(default=0.6, ge=0, le=1)


def with_bounds(codec: PagedCodec, device: torch.device) -> None:
    """Let the codec's pages have bounds. Raises `ValueError` if queries see some pages exactly."""
    if codec.window.pages > 1 or codec.seals_open_page:
        raise ValueError("select: pages are chosen where all but the open one rest alike (sink 0, recent 0)")
    made = {kept: BoundedFormat.over(kept.format) for kept in codec.layers}
    bounded = {
        kept: Kept(fmt, BoundedKernels(fmt, kept.kernels, device), (*kept.wire_planes, *fmt.bounds))
        for kept, fmt in made.items()
    }
    codec.layers = tuple(bounded[kept] for kept in codec.layers)


class Selecting:
    """Implements `Selection` for pages with bounds."""

    def __init__(self, settings: SelectionSettings, retention: Retention) -> None:
        """`retention` says which layers choose."""
        self._settings, self._retention = settings, retention

    def visible(self, layer: int, pool: Pool, batch: Batch, q: Tensor) -> Spans:
        """The pages that q [B, Hq, D] read, in their order."""
        if any(span.prompt for span in batch.spans) or self._reads_all(batch):
            return batch.where
        chooser = self._retention.chooser(layer)
        if chooser not in batch.visible:
            batch.visible[chooser] = self._choose(pool, batch, q)
        return batch.visible[chooser]

    def _reads_all(self, batch: Batch) -> bool:
        """Whether no sequence has pages enough to choose from. On a GPU a choice is made all the same: operators
        follow from the size of a step alone, so that all of them are compiled ahead."""
        few = (self._settings.least + 1) * batch.page_tokens
        return batch.device.type == "cpu" and all(span.held < few for span in batch.spans)

    def _choose(self, pool: Pool, batch: Batch, q: Tensor) -> Spans:
        where, alpha = batch.where, self._settings.alpha
        queries = q.double().unflatten(1, (pool.num_kv_heads, -1)).sum(2)[:, :, None]  # [B, Hkv, 1, D]
        sealed = (where.starts // batch.page_tokens)[:, None, None]
        counts = self._counts(sealed)
        at = torch.arange(where.table.shape[1], device=q.device)
        held = at < sealed  # [B, 1, P]
        bounds = [pool.planes[name][where.table].transpose(1, 2).double() for name in (LEAST, MOST)]  # [B, Hkv, P, D]
        alike = (queries * (alpha * bounds[1] + (1 - alpha) * bounds[0])).sum(-1)
        dropped = None
        if self._settings.select.percent < 50:
            least, most = (
                bound.masked_fill(~held[..., None], edge).unflatten(2, (-1, 2))
                for bound, edge in zip(bounds, (torch.inf, -torch.inf), strict=True)
            )
            pairs = (queries * (alpha * most.amax(3) + (1 - alpha) * least.amin(3))).sum(-1)
            number = (sealed + 1) // 2
            dropped = (_rank(pairs, number) >= ((number + 1) // 2).clamp(min=2)).repeat_interleave(2, -1)
        chosen = _rank(alike, sealed, dropped) < counts
        order = at.where(chosen, at + len(at)).argsort(-1)
        table = where.table[:, None].expand_as(order).gather(-1, order)
        return some_pages(where, batch.page_tokens, table, counts[:, 0, 0])

    def _counts(self, sealed: Tensor) -> Tensor:
        """The number of `sealed` pages that are read."""
        share = self._settings.select
        wanted = (sealed * share.percent / 100).ceil().long() + share.rows
        return torch.minimum(sealed, wanted.clamp(min=self._settings.least))


def _rank(alike: Tensor, number: Tensor, dropped: Tensor | None = None) -> Tensor:
    """The rank of each of the first `number` [B, 1, 1] pages or pairs, by descending `alike` [B, Hkv, P]. The first and
    the last rank before all others, and those that are `dropped` [B, Hkv, P] after all others."""
    at = torch.arange(alike.shape[-1], device=alike.device)
    ends = (at == 0) | (at == number - 1)
    order = alike.masked_fill(ends, torch.inf).argsort(dim=-1, descending=True, stable=True)
    late = (at >= number).long() * 2
    late = late.expand_as(alike) if dropped is None else late + dropped
    return order.gather(-1, late.gather(-1, order).argsort(dim=-1, stable=True)).argsort(-1)
