"""Slots that keep exact rows of prompts, so that later prompts can go on where those rows end. Numbers only.

A prompt that takes over pages needs more than their planes where its queries see some of them exactly (`Window`): the
rows of those pages, which lie in a slot. So after each pass those rows are copied to a slot here, under the name of
the last page that the prompt has sealed. A prompt that finds known pages and no point at their end computes them once
more and leaves one there: that is where prompts part. When slots run short, points that their only prompt has left
behind go first, then the others; of each the least recently used one. So a conversation takes one slot however many
turns it has, and no turn of it takes the slot of another conversation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar


class Source(NamedTuple):
    """A slot to copy from, as a sequence of so many sealed pages left it."""

    slot: int
    pages: int


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Copies before the next pass: first what is kept, then what prompts take over."""

    keeps: dict[int, Source] = field(default_factory=dict)
    """Slot here -> slot of a prompt."""
    resumes: dict[int, Source] = field(default_factory=dict)
    """Slot of a prompt -> slot here."""


Page = TypeVar("Page", bound=Hashable)


class ResumePoints(Generic[Page]):
    """Gives the slots `slots` to pages. `keep` comes after a pass, `resume` between it and `take_moves`."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self._kept: dict[Page, int] = {}
        self._behind: dict[Page, None] = {}
        self._moves = SlotMoves()

    def __contains__(self, page: Page) -> bool:
        return page in self._kept

    @property
    def copied(self) -> frozenset[int]:
        """The slots of prompts whose rows are kept by the next moves."""
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
        """The one prompt that goes on after `page` has come farther: this point goes first, unless it is used again."""
        if page in self._kept:
            self._behind[page] = None

    def resume(self, page: Page, pages: int, slot: int) -> None:
        """Fill `slot` with the exact rows that are kept for `page`, the last of `pages`."""
        self._use(page)
        self._moves.resumes[slot] = Source(self._kept[page], pages)

    def drop(self, page: Page) -> None:
        """Keep nothing for `page` any more."""
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
