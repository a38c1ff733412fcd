"""The batch of one forward pass: the rows that it adds, and the sequences that get them.

Letters: T rows, B sequences, P pages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from hack_kernels.base import Spans
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.packing import Numbers, on_device, table_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one sequence adds in one forward pass: its rows [held, held + count)."""

    slot: int
    held: int
    """Rows that the sequence's cache holds before this pass."""
    count: int
    pages: tuple[int, ...]
    """The sequence's pages by pool index, in order: at least up to the last page that these rows fill."""
    evicted: int = 0
    """Rows that the cache evicted earlier. The first new row stands at position `held + evicted` of the text."""
    prompt: int = 0
    """Tokens of the whole prompt, if these are its rows and `Eviction.evict` may drop some; else 0."""

    @property
    def position(self) -> int:
        """Position of the first new row in the text."""
        return self.held + self.evicted


@dataclass(frozen=True, slots=True)
class Filled:
    """Pages that a batch completes: pool index, number of the first row, and the batch rows that land in them."""

    page_id: int
    start: int
    span: int
    row: int
    """Row of the batch that holds the page's first new token."""
    old: int
    """Rows of the page that lie in the slot already."""


@dataclass(frozen=True, slots=True)
class Fills:
    """Pages that are complete, as kernels take them."""

    page_ids: Tensor
    """[P] int64 on the device."""
    starts: Tensor
    """[P] int64 on the device: the number of each page's first row."""
    slots: Tensor
    """[P] int64 on the device: the slot of each page's sequence."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The last rows of some spans of a batch."""

    rows: Tensor
    """[R] int64 on the device: their numbers in the batch."""
    where: Spans
    """The same rows as a decode batch, once the cache holds the whole batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat ragged batch: the spans one after another, with what every layer needs of them computed once."""

    spans: tuple[Span, ...]
    page_tokens: int
    where: Spans
    """The spans as kernels take them: int64 on the device."""
    is_decode: bool
    """Whether every sequence adds exactly one row."""
    faulty: Tensor
    """[B] bool on the device: whether a sequence has a value of K or V that is not finite in FP16. A pass sets it;
    the host reads it once, when all layers are done."""
    filled: tuple[Filled, ...] = field(default=())
    fills: Fills | None = None
    """`filled` as kernels take it; None if that is empty."""
    more: tuple[Tensor, ...] = ()
    """The lists `more` that `of` was given, int64 on the device."""
    visible: dict[int, Spans] = field(default_factory=dict)
    """Layer -> the pages that its queries see, if layers choose pages. A later layer may reuse the choice."""
    ends: Ends | None = None
    """The rows whose attention the last layer gives. None: it gives all rows."""

    @property
    def device(self) -> torch.device:
        """The device of the batch's tensors."""
        return self.where.starts.device

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        page_tokens: int,
        device: torch.device = CPU,
        last: Batch | None = None,
        more: Sequence[Sequence[int]] = (),
    ) -> Batch:
        """Lay out `spans` in the given order, and lists `more` with them; one copy brings all to `device`.

        `last` is an earlier batch of the same page size. If its spans have the same slots, pages and counts, its
        tensors are reused, all but `starts` and `faulty`. In decode this is the usual case.
        """
        offsets: list[int] = []
        filled: list[Filled] = []
        row = 0
        for index, span in enumerate(spans):
            offsets.append(row)
            old = span.held % page_tokens
            if old + span.count >= page_tokens:
                for page in range(span.held // page_tokens, (span.held + span.count) // page_tokens):
                    begin = max(span.held, page * page_tokens)
                    kept = old if page * page_tokens < span.held else 0
                    filled.append(Filled(span.pages[page], page * page_tokens, index, row + begin - span.held, kept))
            row += span.count
        stays = last.where if last is not None and _same_places(spans, last.spans) else None
        lists: list[Numbers] = [[span.held for span in spans], *more]
        if filled:
            lists += [[page.page_id for page in filled], [page.start for page in filled]]
            lists.append([spans[page.span].slot for page in filled])
        if stays is None:
            lists += [[span.count for span in spans], offsets, [span.slot for span in spans]]
            lists.append(table_of([span.pages for span in spans]))
        starts, *rest = on_device(lists, device)
        along, rest = tuple(rest[: len(more)]), rest[len(more) :]
        fills = Fills(rest.pop(0), rest.pop(0), rest.pop(0)) if filled else None
        if stays is None:
            counts, offset, slots, table = rest
            where = Spans(starts, counts, offset, table.view(len(spans), -1), slots)
        else:
            where = Spans(starts, stays.counts, stays.offsets, stays.table, stays.slots)
        faulty = torch.zeros(len(spans), dtype=torch.bool, device=device)
        return cls(tuple(spans), page_tokens, where, row == len(spans), faulty, tuple(filled), fills, along)

    def ending(self, spans: Tensor, rows: Tensor) -> Batch:
        """This batch with `ends`: the last rows of these spans, [R] int64, whose numbers are `rows` [R] int64."""
        where, last = self.where, torch.ones_like(rows)
        starts, counts, slots = (each[spans] for each in (where.starts, where.counts, where.slots))
        offsets = torch.arange(len(rows), device=self.device)
        ends = Spans(starts + counts - 1, last, offsets, where.table[spans], slots)
        return replace(self, ends=Ends(rows, ends))


def _same_places(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether the spans differ at most in `held` and `evicted`."""
    return len(spans) == len(others) and all(
        span.slot == other.slot
        and span.count == other.count
        and (span.pages is other.pages or span.pages == other.pages)  # a tuple compares all its pages, even to itself
        for span, other in zip(spans, others, strict=True)
    )


def non_finite(layer: int, batch: Batch, k: Tensor, v: Tensor) -> NonFiniteError:
    """The error that names layer, tensor, position and KV head of the first value of K, else of V, that FP16 does not
    hold. Reads whole tensors.

    If FP16 holds every value, the row that a codec made of them may still be too large. Then `batch.faulty` says which
    sequence it is. Raises `ValueError` if no sequence is at fault.
    """
    for name, x in (("K", k), ("V", v)):
        for row, head, channel in (~torch.isfinite(x.to(torch.float16))).nonzero().tolist():
            offsets = batch.where.offsets.tolist()
            span = bisect_right(offsets, row) - 1
            position = batch.spans[span].position + row - offsets[span]
            value = float(x[row, head, channel])
            what = f"{value}" if not math.isfinite(value) else f"{value:g}, beyond FP16"
            return NonFiniteError(f"layer {layer}: {name} is {what} at token {position}, KV head {head}", span)
    for span in batch.faulty.nonzero().flatten().tolist():
        first, count = batch.spans[span].position, batch.spans[span].count
        where = f"token {first}" if count == 1 else f"one of tokens {first} to {first + count - 1}"
        return NonFiniteError(f"layer {layer}: K or V is beyond FP16 at {where} in the form that rests", span)
    raise ValueError("every value is finite")
