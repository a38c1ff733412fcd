"""An example of a codec that does not read all pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from hack_kernels import load
from hack_kernels.base import Backend, Pool, Spans
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from torch import Tensor

from hackkv.batch import Batch
from hackkv.choices import some_pages
from hackkv.codecs.paged import Kept, PagedCodec
from hackkv.model.worker import Worker
from tests.pair import PI, tiny_worker

HEAD_DIM: Final = 64
LAYERS: Final = 2


def rows_on(backend: Backend) -> tuple[Kept, ...]:
    """FP16 pages in every layer of the tiny model."""
    fmt = RowFormat(HEAD_DIM, PI)
    return (Kept(fmt, backend.kernels_for(fmt, RowReference)),) * LAYERS


class SelectingCodec(PagedCodec):
    """FP16 rows. Every KV head reads the share `share` of pages whose keys are nearest to its queries."""

    def __init__(self, share: float, *, shuffle: bool = False) -> None:
        backend = load("reference")
        super().__init__("fp16-selected", rows_on(backend), backend, (("share", str(share)),))
        self.share = share
        self.shuffle = shuffle
        self.read_pages = 0
        self.held_pages = 0

    def visible(self, layer: int, pool: Pool, batch: Batch, q: Tensor) -> Spans:
        """Choose pages, one sequence after another. All heads of a sequence read equally many."""
        where, heads = batch.where, pool.num_kv_heads
        counts = [self._count(span.held // PI) for span in batch.spans]
        table = torch.zeros(len(counts), heads, max(*counts, 1), dtype=torch.int64)
        for b, (span, count) in enumerate(zip(batch.spans, counts, strict=True)):
            pages = where.table[b, : span.held // PI]
            queries = q[b].float().view(heads, -1, HEAD_DIM).mean(1)
            scores = torch.einsum("phtd,hd->hp", pool.planes["k"][pages].float(), queries)
            best = scores.topk(count, dim=-1).indices if count else torch.zeros(heads, 0, dtype=torch.int64)
            best = best.flip(-1) if self.shuffle else best.sort(-1).values
            table[b, :, :count] = pages[best]
            self.read_pages += count
            self.held_pages += len(pages)
        return some_pages(where, PI, table, torch.tensor(counts))

    def _count(self, pages: int) -> int:
        return -int(-pages * self.share // 1)


def worker_of(codec: PagedCodec) -> Worker:
    """A worker with the tiny model of the other tests and this codec."""
    whole = tiny_worker("fp16")
    theirs = dict(whole.codec.fingerprint())
    fields = tuple(field for field in whole.fingerprint.fields if field[0] not in theirs)
    return replace(whole, codec=codec, fingerprint=replace(whole.fingerprint, fields=(*fields, *codec.fingerprint())))
