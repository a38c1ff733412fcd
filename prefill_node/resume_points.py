"""Slots that keep exact rows of prompts, so that later prompts can go on where those rows end. Numbers only.

If the queries of a prompt see some pages exactly (`Window`), the planes of those pages are not enough to share them:
the prompt also needs their exact rows, which are in a slot. So after each pass those rows are copied to a slot here,
under the name of the last page that the prompt has sealed. This is a *resume point*. A prompt that finds known pages
without a point at their end computes them once more and leaves a point there: that is where prompts part. When slots
run short, points that their only prompt has passed go first, then the others; the least recently used one of each. So a
conversation takes one slot however many turns it has, and no turn takes the slot of another conversation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar


class Source(NamedTuple):
    """A slot to copy from, and the number of sealed pages of the sequence that filled it."""

    slot: int
    pages: int


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Copies before the next pass: first rows to keep, then rows that prompts take over."""

    keeps: dict[int, Source] = field(default_factory=dict)
    """Slot here -> slot of a prompt."""
    resumes: dict[int, Source] = field(default_factory=dict)
    """Slot of a prompt -> slot here."""


Page = TypeVar("Page", bound=Hashable)


class ResumePoints(Generic[Page]):
    """Gives the slots `slots` to pages. Call `keep` after a pass, and `resume` between `keep` and `take_moves`."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self._kept: dict[Page, int] = {}
        self._behind: dict[Page, None] = {}
        self._moves = SlotMoves()

    def __contains__(self, page: Page) -> bool:
        return page in self._kept

    @property
    def copied(self) -> frozenset[int]:
        """The slots of prompts from which the next moves copy rows to keep."""
        return frozenset(source.slot for source in self._moves.keeps.values())

    def keep(self, page: Page, source: Source) -> None:
        """Keep the exact rows that a prompt needs to go on after `page`, the last one of `source`."""
        if page in self._kept:
            self._use(page)
            return
        if not self._free:
            self.drop(next(iter(self._behind or self._kept)))
        kept = self._kept[page] = self._free.pop()
        self._moves.keeps[kept] = source

    def leave_behind(self, page: Page) -> None:
        """Mark the point of `page` to go first, unless it is used again: the only prompt after it has come farther."""
        if page in self._kept:
            self._behind[page] = None

    def resume(self, page: Page, pages: int, slot: int) -> None:
        """Fill `slot` with the exact rows that are kept for `page`, the last of `pages`."""
        self._use(page)
        self._moves.resumes[slot] = Source(self._kept[page], pages)

    def drop(self, page: Page) -> None:
        """Drop the point of `page`, if there is one."""
        self._behind.pop(page, None)
        kept = self._kept.pop(page, None)
        if kept is not None:
            self._free.append(kept)

    def take_moves(self) -> SlotMoves:
        """Take the copies that are due before the next pass."""
        moves, self._moves = self._moves, SlotMoves()
        return moves

    def _use(self, page: Page) -> None:
        self._behind.pop(page, None)
        self._kept[page] = self._kept.pop(page)
