"""The line for room on a node: oldest request first, small ones may pass, and nobody is passed for ever.

A request that finds no room may be passed by later ones that do, so that one large prompt does not leave pages idle
that twenty small ones could use. Passing it ends when it has waited `ageing_s` or was passed `max_passed` times: from
then on whatever is freed collects for it. A request too large for every node that is here now (the one that could hold
it may be restarting) holds nobody up.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.policy import Need


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others may pass a request that does not fit."""

    ageing_s: float = 5.0
    max_passed: int = 16


@dataclass(slots=True, eq=False)
class Place:
    """Someone in line. `turn` counts requests in the order of their arrival at the router."""

    turn: int
    need: Need
    since: float
    avoid: AbstractSet[str] = frozenset()
    passed: int = 0

    def asks_no_less_than(self, other: Place) -> bool:
        """Whether every node without room for `other` has none for this."""
        more = self.need.landing >= other.need.landing and self.need.whole >= other.need.whole
        return more and self.avoid == other.avoid


def next_in_line(
    line: Sequence[Place],
    fits: Callable[[Place], bool],
    could_fit: Callable[[Place], bool],
    now: float,
    patience: Patience,
) -> int | None:
    """Index of the place to serve now, or None. `fits`: there is room now; `could_fit`: there is, once others end.

    Who asks for no less than somebody who does not fit does not fit either: a line of a thousand is passed in no time.
    """
    refused: Place | None = None
    for index, place in enumerate(line):
        if refused is None or not place.asks_no_less_than(refused):
            if fits(place):
                return index
            refused = place
        impatient = now - place.since >= patience.ageing_s or place.passed >= patience.max_passed
        if impatient and could_fit(place):
            return None
    return None


class Held(Protocol):
    """What is waited for."""

    def release(self) -> None:
        """Give it back."""
        ...


HeldT = TypeVar("HeldT", bound=Held)


class _Waiter(Place, Generic[HeldT]):
    def __init__(self, turn: int, need: Need, since: float, avoid: AbstractSet[str]) -> None:
        super().__init__(turn, need, since, avoid)
        self.served: asyncio.Future[HeldT] = asyncio.get_running_loop().create_future()


class Line(Generic[HeldT]):
    """Waiting requests. `serve` is to be called whenever there may be room."""

    def __init__(
        self,
        take: Callable[[Place], HeldT],
        fits: Callable[[Place], bool],
        could_fit: Callable[[Place], bool],
        now: Callable[[], float],
        patience: Patience,
    ) -> None:
        self._take, self._fits, self._could_fit, self._now, self._patience = take, fits, could_fit, now, patience
        self._waiters: list[_Waiter[HeldT]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def try_now(self, turn: int, need: Need, avoid: AbstractSet[str]) -> HeldT | None:
        """What is waited for, if it can be had without waiting."""
        waiter = self._join(turn, need, avoid)
        if waiter.served.done():
            return waiter.served.result()
        self._waiters.remove(waiter)
        return None

    async def wait(self, turn: int, need: Need, avoid: AbstractSet[str]) -> HeldT:
        """Stand in line."""
        waiter = self._join(turn, need, avoid)
        try:
            return await waiter.served
        except asyncio.CancelledError:
            # Cancelled between being served and waking up: what it was given must not stay held.
            if waiter.served.done() and not waiter.served.cancelled():
                waiter.served.result().release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.serve()

    def serve(self) -> None:
        """Give out what there is."""
        while True:
            index = next_in_line(self._waiters, self._fits, self._could_fit, self._now(), self._patience)
            if index is None:
                return
            for passed in self._waiters[:index]:
                passed.passed += 1
            waiter = self._waiters.pop(index)
            if not waiter.served.done():  # cancelled, and not yet awake
                waiter.served.set_result(self._take(waiter))

    def _join(self, turn: int, need: Need, avoid: AbstractSet[str]) -> _Waiter[HeldT]:
        waiter: _Waiter[HeldT] = _Waiter(turn, need, self._now(), avoid)
        insort(self._waiters, waiter, key=lambda place: place.turn)
        self.serve()
        return waiter
