"""Decode reads some of the pages that a sequence holds. Each KV head chooses its own (MPCache, arXiv 2501.06807, §4.3).

Pages are chosen by the bounds of their keys (`hack_kernels.page_selection`), in two levels: if less than half of the
pages is to be read, the better half of the pairs of pages stays. Of the pages that are left, those with the best scores
are read. The first and the last page are always read, and so is the open one. With `pairs`, layers 2 and 3, 4 and 5 and
so on read the same pages: the even layer chooses (§4.4).

Rows of prompts see all pages. Decode that leaves pages out makes other K and V of later rows. So a replay runs one row
after the other, as decode did (`KvCodec.decodes_as_prefill`).
"""

from __future__ import annotations

import torch
from hack_kernels.base import Pool, RowKernels, Spans
from hack_kernels.bounded import LEAST, MOST, BoundedFormat, BoundedKernels
from hack_kernels.page_selection import BoundedPages
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

    def __init__(self, settings: SelectionSettings, retention: Retention, rows: RowKernels) -> None:
        """`retention` says which layers choose, and `rows` has the operation that does."""
        self._settings, self._retention, self._rows = settings, retention, rows

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
        where, sealed = batch.where, batch.where.starts // batch.page_tokens
        counts = self._counts(sealed)
        pages = BoundedPages(pool.planes[LEAST], pool.planes[MOST], where.table, sealed)
        halve = self._settings.select.percent < 50
        table = self._rows.select_pages(q, pages, counts, self._settings.alpha, halve=halve)
        return some_pages(where, batch.page_tokens, table, counts)

    def _counts(self, sealed: Tensor) -> Tensor:
        """The number of `sealed` pages that are read."""
        share = self._settings.select
        wanted = (sealed * share.percent / 100).ceil().long() + share.rows
        return torch.minimum(sealed, wanted.clamp(min=self._settings.least))
