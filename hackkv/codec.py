"""What a codec is: the form in which KV rests, travels and is attended to.

A codec owns three things: the *planes* of a page (`PageFormat`), the arithmetic on them (`attend`), and their form on
the wire (`to_wire`, `from_wire`). Schedulers, pools, wires and engines see pages only as planes of bytes, so a new
codec plugs in by entering the `CODECS` table.

All codecs share the life of a page: rows collect as FP16 in the sequence's open page (one *slot* of `open_k`, `open_v`)
and the page is sealed when it is full. Letters: T tokens, B sequences, N pages, S slots, Π page_tokens, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from hack_kernels.base import Spans
from torch import Tensor

from hackkv.errors import NonFiniteError

FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a page of one layer and KV head. `on_wire` False: derived again by the receiver."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_wire: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of this plane in one page of one KV head."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The planes of a sealed page, in wire order, and the size of an open one."""

    planes: tuple[Plane, ...]
    page_tokens: int
    head_dim: int

    @property
    def wire_planes(self) -> tuple[Plane, ...]:
        """The planes that travel."""
        return tuple(plane for plane in self.planes if plane.on_wire)

    @property
    def resident_bytes(self) -> int:
        """Bytes of a sealed page of one layer and KV head at rest."""
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def wire_bytes(self) -> int:
        """Raw bytes of a sealed page of one layer and KV head on the wire."""
        return sum(plane.page_bytes for plane in self.wire_planes)

    @property
    def fp16_bytes(self) -> int:
        """Bytes of the same rows of K and V, uncompressed."""
        return 2 * FP16_BYTES * self.page_tokens * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pool on one node: sealed pages by plane, and the open pages of the sequences in flight."""

    planes: dict[str, Tensor]
    """Plane name -> [N, Hkv, ...]; the order inside belongs to the codec's kernels."""
    open_k: Tensor
    """[S, Hkv, Π, D] float16."""
    open_v: Tensor
    """[S, Hkv, Π, D] float16."""

    def heads(self, start: int, count: int) -> LayerPages:
        """A view of KV heads [start, start + count)."""
        part = slice(start, start + count)
        planes = {name: plane[:, part] for name, plane in self.planes.items()}
        return LayerPages(planes, self.open_k[:, part], self.open_v[:, part])


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one sequence adds in one forward pass: positions [start, start + count)."""

    slot: int
    start: int
    count: int
    pages: tuple[int, ...]
    """Pool index of every page of the sequence up to and including those that these rows fill, or of more."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Pages that a batch completes: pool index, first position, and the batch rows that land in them."""

    page_id: int
    start: int
    span: int
    row: int
    """Row of the batch that holds the page's first new token."""
    old: int
    """Tokens of the page that lie in the open page already."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat ragged batch: the spans one after another, with what every layer needs of them computed once."""

    spans: tuple[Span, ...]
    page_tokens: int
    where: Spans
    """The same for kernels: int64 on the CPU."""
    is_decode: bool
    """Whether every sequence adds exactly one row."""
    filled: tuple[Filled, ...] = field(default=())

    @classmethod
    def of(cls, spans: Sequence[Span], page_tokens: int, last: Batch | None = None) -> Batch:
        """Lay out `spans` in the given order.

        What `last`, an earlier batch of the same page size, has of the same sequences, pages and counts is shared: in
        decode that is all but the positions, most of the time.
        """
        offsets: list[int] = []
        filled: list[Filled] = []
        row = 0
        for index, span in enumerate(spans):
            offsets.append(row)
            old = span.start % page_tokens
            if old + span.count >= page_tokens:
                for page in range(span.start // page_tokens, (span.start + span.count) // page_tokens):
                    begin = max(span.start, page * page_tokens)
                    kept = old if page * page_tokens < span.start else 0
                    filled.append(Filled(span.pages[page], page * page_tokens, index, row + begin - span.start, kept))
            row += span.count
        starts = int64([span.start for span in spans])
        if last is not None and _same_places(spans, last.spans):
            where = Spans(starts, last.where.counts, last.where.offsets, last.where.table, last.where.slots)
        else:
            counts, slots = int64([span.count for span in spans]), int64([span.slot for span in spans])
            where = Spans(starts, counts, int64(offsets), _table(spans), slots)
        return cls(tuple(spans), page_tokens, where, row == len(spans), tuple(filled))


def _same_places(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether they differ in their positions at most."""
    return len(spans) == len(others) and all(
        span.slot == other.slot
        and span.count == other.count
        and (span.pages is other.pages or span.pages == other.pages)  # a tuple compares all its pages, even to itself
        for span, other in zip(spans, others, strict=True)
    )


def _table(spans: Sequence[Span]) -> Tensor:
    """int64 [B, Pmax]: the pages of every span, zeros past the last."""
    width = max(len(span.pages) for span in spans)
    pages = [page for span in spans for page in (*span.pages, *((0,) * (width - len(span.pages))))]
    return int64(pages).view(len(spans), width)


def int64(values: Sequence[Any]) -> Tensor:
    """A tensor of whole numbers, in a third of the time that `torch.tensor` takes: every step makes some."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


class KvCodec(Protocol):
    """One way to keep a KV cache. Implementations are stateless but for timers: pools are passed in."""

    name: str
    format: PageFormat
    quantize_s: float
    """Seconds spent sealing so far."""
    attend_s: float
    """Seconds spent in attention so far."""

    @property
    def approximation_s(self) -> float:
        """Seconds within `attend_s` spent on correction terms or on dequantizing, where they can be told apart."""
        ...

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Every setting that changes bytes or results, as named fields for the handshake."""
        ...

    def new_layer(self, num_pages: int, num_slots: int, num_kv_heads: int) -> LayerPages:
        """An empty pool for one layer."""
        ...

    def attend(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [T, Hkv, D] to the cache and return the attention of q [T, Hq, D] over it, causal, in q's dtype.

        Full pages are sealed into `pool`, the rest goes to the open pages. Repeating a call with the same batch and
        rows writes the same bytes, unless a span of several rows starts inside a page and ends in a later one: its open
        page then holds the later rows. Raises `NonFiniteError` naming the span before anything is written.
        """
        ...

    def sealed_pages(self, tokens: int) -> int:
        """How many pages of a sequence of `tokens` rest as planes; the rows past them lie in its open page."""
        ...

    def to_wire(self, pool: LayerPages, page_ids: Tensor) -> dict[str, Tensor]:
        """Planes that travel, in wire order: name -> [Hkv, P, *plane shape], contiguous."""
        ...

    def from_wire(self, pool: LayerPages, page_ids: Tensor, planes: dict[str, Tensor]) -> None:
        """Install pages that `to_wire` of an equal codec produced, bit-exact."""
        ...


def to_rows(layer: int, batch: Batch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Round K and V to FP16, once. Raises `NonFiniteError` naming layer, tensor, position and KV head."""
    rows = k.to(torch.float16), v.to(torch.float16)
    if not all(bool(torch.isfinite(half).all()) for half in rows):
        raise non_finite(layer, batch, k, v)
    return rows


def non_finite(layer: int, batch: Batch, k: Tensor, v: Tensor) -> NonFiniteError:
    """The error that names the first value of K, else of V, that FP16 does not hold."""
    for name, x in (("K", k), ("V", v)):
        for row, head, channel in (~torch.isfinite(x.to(torch.float16))).nonzero().tolist():
            span = int((batch.where.offsets <= row).sum()) - 1
            position = batch.spans[span].start + row - int(batch.where.offsets[span])
            value = float(x[row, head, channel])
            what = f"{value}" if not math.isfinite(value) else f"{value:g}, beyond FP16"
            return NonFiniteError(f"layer {layer}: {name} is {what} at token {position}, KV head {head}", span)
    raise ValueError("every value is finite")
