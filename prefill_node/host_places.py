"""Numbered places for sealed pages in host memory, and the copies to and from them at the start of the next pass."""

from __future__ import annotations

from dataclasses import dataclass, field

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


class HostPlaces:
    """Hands out a fixed number of places. A place that `load` reads is free again after `take_moves`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._moves = Moves()

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

    def give_back(self, place: int) -> None:
        """Free a place whose page is not wanted any more."""
        self._free.append(place)

    def take_moves(self) -> Moves:
        """What must be copied before the next pass, once. Later moves come after these."""
        moves, self._moves = self._moves, Moves()
        self._free.extend(moves.loads.values())
        return moves
