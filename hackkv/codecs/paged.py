"""The life of a page, which all codecs share: rows collect in the open page, a full page is sealed, queries read both.

A subclass says how to seal and how to attend. The order matters: in a prefill batch the queries of a page still read
its FP16 rows when it has been sealed already, so the open page is overwritten last; in decode the new row is written
first, in one call, and sealing and attention find it in the open page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter

import torch
from hack_kernels.base import HackKernels
from torch import Tensor

from hackkv.codec import Batch, LayerPages, PageFormat, non_finite, to_rows


class PagedCodec(ABC):
    """Base of the codecs; implements `attend` of `KvCodec`."""

    name: str
    format: PageFormat
    kernels: HackKernels

    def __init__(self) -> None:
        self.quantize_s = 0.0
        self.attend_s = 0.0

    def attend(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append rows and attend; see `KvCodec.attend`."""
        if batch.is_decode:
            if not self.kernels.append(pool.open_k, pool.open_v, batch.where, k, v):
                raise non_finite(layer, batch, k, v)
            began = perf_counter()
            if self.seals(batch):
                self.seal(layer, pool, batch, *decode_rows(pool, batch))
            sealed = perf_counter()
            out = self.decode(layer, pool, batch, q)
        else:
            k, v = to_rows(layer, batch, k, v)
            began = perf_counter()
            if self.seals(batch):
                self.seal(layer, pool, batch, k, v)
            sealed = perf_counter()
            out = self.prefill(layer, pool, batch, q, k, v)
            write_open_rows(pool, batch, k, v)
        self.quantize_s += sealed - began
        self.attend_s += perf_counter() - sealed
        return out

    def seals(self, batch: Batch) -> bool:
        """Whether `seal` has anything to do."""
        return bool(batch.filled)

    def sealed_pages(self, tokens: int) -> int:
        """Full pages only: the open page stays in FP16."""
        return tokens // self.format.page_tokens

    @abstractmethod
    def seal(self, layer: int, pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Write the pages that `batch` fills into the pool; k, v [T, Hkv, D] float16 are all rows of the batch."""

    @abstractmethod
    def prefill(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of many rows per sequence; the batch's own rows are in k, v [T, Hkv, D] float16 only."""

    @abstractmethod
    def decode(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor) -> Tensor:
        """Attention of one row per sequence, whose K and V stand in the open page already."""


def write_open_rows(pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> None:
    """Copy the rows that no full page takes into their sequences' open pages. k, v [T, Hkv, D] float16."""
    pi = batch.page_tokens
    for span, offset in zip(batch.spans, batch.where.offsets.tolist(), strict=True):
        end = span.start + span.count
        begin = max(span.start, end // pi * pi)
        rows = slice(offset + begin - span.start, offset + span.count)
        for open_rows, x in ((pool.open_k, k), (pool.open_v, v)):
            open_rows[span.slot, :, begin % pi : begin % pi + end - begin] = x[rows].transpose(0, 1)


def decode_rows(pool: LayerPages, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of a decode batch, [B, Hkv, D] float16, from their places in the open pages."""
    slots, at = batch.where.slots, batch.where.starts % batch.page_tokens
    return pool.open_k[slots, :, at], pool.open_v[slots, :, at]


def filled_pages(pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the pages that `batch` fills, [P, Hkv, Π, D] float16: open rows first, then the batch's own."""
    pi = batch.page_tokens
    pages: tuple[list[Tensor], list[Tensor]] = ([], [])
    for page in batch.filled:
        rows = slice(page.row, page.row + pi - page.old)
        slot = batch.spans[page.span].slot
        for out, open_rows, x in ((pages[0], pool.open_k, k), (pages[1], pool.open_v, v)):
            new = x[rows].transpose(0, 1)
            out.append(torch.cat((open_rows[slot, :, : page.old], new), dim=1) if page.old else new)
    return torch.stack(pages[0]), torch.stack(pages[1])
