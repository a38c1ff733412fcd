"""The input of a decode step, at one place on the device, where recorded steps read it (`hackkv.model.graphs`).

A step has as many rows as the device has recorded. Rows past its sequences are padding: they write to a slot that no
sequence ever has. Pages past those that the step fills are padding too, and are sealed to a page that no sequence has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from hack_kernels.base import Spans
from torch import Tensor

from hackkv.batch import Batch, Fills, Span
from hackkv.packing import STRIDE
from hackkv.streams import DONE, Lane, Mark

STARTS, IDS, POSITIONS, SLOTS, PAGE_IDS, PAGE_STARTS, PAGE_SLOTS = range(7)
LISTS: Final = 7
MIRRORS: Final = 4
"""Step inputs that the host may have written before the device has copied them. Two steps may be under way. Each puts
one for its rows, and may put another for sequences that join or for pages to seal."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A page and a slot that no sequence has. Padding writes there, and nobody reads it."""

    page: int
    slot: int


@dataclass(slots=True, eq=False)
class _Mirror:
    """The input of a step in host memory."""

    memory: Tensor
    """[all numbers] int64, the lists and then the table."""
    lists: npt.NDArray[np.int64]
    """[LISTS, room]: a view."""
    table: npt.NDArray[np.int64]
    """[most, width]: a view."""
    rows: list[tuple[int, ...]]
    """The pages that stand in each row of the table."""
    copied: Mark = field(default=DONE)

    def write_table(self, spans: Sequence[Span]) -> None:
        """Write those rows that have changed; what stands past a sequence's pages is not read."""
        for row, span in enumerate(spans):
            if self.rows[row] is not span.pages:
                self.table[row, : len(span.pages)] = span.pages
                self.rows[row] = span.pages


class StepInput:
    """The input of steps of up to `most` sequences of up to `pages` pages each."""

    def __init__(self, most: int, pages: int, page_tokens: int, spare: Spare, device: torch.device) -> None:
        self.most, self._page_tokens, self._spare = most, page_tokens, spare
        room, self._width = (-(-count // STRIDE) * STRIDE for count in (most, pages))
        self._lists_end = LISTS * room
        total = self._lists_end + most * self._width
        self._there = torch.zeros(total, dtype=torch.int64, device=device)
        self._lists = self._there[: self._lists_end].view(LISTS, room)
        self._table = self._there[self._lists_end :].view(most, self._width)
        self._counts = torch.ones(most, dtype=torch.int64, device=device)
        self._offsets = torch.arange(most, device=device)
        self._mirrors = deque(self._mirror(total, room, pinned=device.type == "cuda") for _ in range(MIRRORS))
        self._rows: list[tuple[int, ...]] = [()] * most
        """The pages that stand in each row of the table on the device."""

    @property
    def ids(self) -> Tensor:
        """[most] int64: the tokens."""
        return self._lists[IDS]

    @property
    def positions(self) -> Tensor:
        """[most] int64: where the tokens stand in the text."""
        return self._lists[POSITIONS]

    def batch(self, size: int, faulty: Tensor) -> Batch:
        """A step of `size` rows as the device reads it; the host knows none of its sequences. `faulty` [size]."""
        starts, slots = self._lists[STARTS, :size], self._lists[SLOTS, :size]
        where = Spans(starts, self._counts[:size], self._offsets[:size], self._table[:size], slots)
        return Batch((), self._page_tokens, where, is_decode=True, faulty=faulty)

    def fills(self, count: int) -> Fills:
        """The first `count` pages that a step fills."""
        return Fills(*(self._lists[each, :count] for each in (PAGE_IDS, PAGE_STARTS, PAGE_SLOTS)))

    def filled(self, spans: Sequence[Span]) -> list[Span]:
        """The spans that fill a page with their row."""
        return [span for span in spans if (span.held + 1) % self._page_tokens == 0]

    def put(
        self, spans: Sequence[Span], ids: Sequence[int], size: int, filled: Sequence[Span], fills: int, lane: Lane
    ) -> None:
        """Bring a step to the device in one copy on `lane`, the stream that computes. The step has `size` rows; `ids`
        are the tokens of `spans`. It seals `fills` pages: those that `filled` fill, and padding."""
        here = self._mirrors[0]
        self._mirrors.rotate(-1)
        here.copied.wait()
        spare = self._spare
        rows, pages = size - len(spans), fills - len(filled)
        for each, numbers, nobody, padded in (
            (STARTS, [span.held for span in spans], 0, rows),
            (IDS, ids, 0, rows),
            (POSITIONS, [span.position for span in spans], 0, rows),
            (SLOTS, [span.slot for span in spans], spare.slot, rows),
            (PAGE_IDS, [span.pages[span.held // self._page_tokens] for span in filled], spare.page, pages),
            (PAGE_STARTS, [span.held + 1 - self._page_tokens for span in filled], 0, pages),
            (PAGE_SLOTS, [span.slot for span in filled], spare.slot, pages),
        ):
            here.lists[each, : len(numbers) + padded] = [*numbers, *[nobody] * padded]
        changed = self._changed(spans)
        here.write_table(spans[:changed])
        stop = self._lists_end + changed * self._width
        self._there[:stop].copy_(here.memory[:stop], non_blocking=True)
        here.copied = lane.mark()

    def _changed(self, spans: Sequence[Span]) -> int:
        """The number of rows of the table, from the first on, that have to be copied so that all are right."""
        changed = 0
        for row, span in enumerate(spans):
            if self._rows[row] is not span.pages:
                self._rows[row], changed = span.pages, row + 1
        return changed

    def _mirror(self, total: int, room: int, *, pinned: bool) -> _Mirror:
        memory = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
        lists = memory[: self._lists_end].view(LISTS, room).numpy()
        table = memory[self._lists_end :].view(self.most, self._width).numpy()
        return _Mirror(memory, lists, table, [()] * self.most)
