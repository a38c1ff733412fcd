"""Numbered places for sealed pages in host memory, pages that came from decode nodes, and the copies that the next pass
makes of both before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hackkv.page_names import PageName
from prefill_node.fetched import Fetched, Install
from prefill_node.resume_points import SlotMoves


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies before the next pass: first all pages that leave the pool, then those that enter it."""

    saves: dict[int, int] = field(default_factory=dict)
    """Place in host memory -> page to copy there."""
    loads: dict[int, int] = field(default_factory=dict)
    """Page -> place in host memory to copy from."""
    slots: SlotMoves = field(default_factory=SlotMoves)
    """Exact rows, after all pages."""
    installs: list[Install] = field(default_factory=list)
    """Copies of fetched pages, which come after all others."""


class HostPlaces:
    """Hands out a fixed number of places. A place that `load` reads is free again after `take_moves`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._moves = Moves()
        self._fetched: dict[PageName, Fetched] = {}

    def save(self, page: int) -> int | None:
        """A place to which `page` will be copied; None if no place is free."""
        if not self._free:
            return None
        place = self._free.pop()
        self._moves.saves[place] = page
        return place

    def load(self, place: int, page: int) -> None:
        """Plan to copy `place` to `page`. The place is free after that."""
        self._moves.loads[page] = place

    def offer(self, name: PageName, fetched: Fetched) -> None:
        """Note that fetched pages end with page `name`. `withdraw` must follow."""
        self._fetched[name] = fetched

    def withdraw(self, name: PageName, fetched: Fetched) -> None:
        """End the offer, if there is one."""
        if self._fetched.get(name) is fetched:
            del self._fetched[name]

    def fetched(self, names: Sequence[PageName], known: int) -> Fetched | None:
        """The offer that reaches farthest into the pages `names`, of which the first `known` are here."""
        if not self._fetched:
            return None
        offers = (self._fetched.get(name) for name in reversed(names))
        return next((one for one in offers if one is not None and one.parts and one.first <= known), None)

    def install(self, install: Install) -> None:
        """Plan to write fetched pages."""
        self._moves.installs.append(install)

    def give_back(self, place: int) -> None:
        """Free a place whose page is not needed any more."""
        self._free.append(place)

    def take_moves(self) -> Moves:
        """Take the copies that are due before the next pass. Later moves come after these."""
        moves, self._moves = self._moves, Moves()
        self._free.extend(moves.loads.values())
        return moves
