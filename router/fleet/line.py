"""The line for room on a node. The oldest request comes first, small ones may pass it, and none is passed for ever.

A request that finds no room may be passed by later requests that fit. So one large prompt does not leave pages idle
that twenty small ones could use. Once a request has waited `ageing_s` or was passed `max_passed` times, no other passes
it any more, and freed pages collect for it. A request that is too large for every node that is here now holds nobody
up; the node that could hold it may be restarting.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.fleet.holdings import Marks
from router.fleet.policy import Need


@dataclass(frozen=True, slots=True)
class Demand:
    """The share of a node for which a request asks a desk."""

    need: Need
    serial: int
    """Place in the order of arrival at the router."""
    avoid: AbstractSet[str] = frozenset()
    """Nodes that failed the request."""
    marks: Marks = ()
    """Marks of the prompt's first pages, which nodes may hold."""
    recovering: bool = False
    """The request was placed on nodes before. A full line does not turn it away."""

    def is_no_less_than(self, other: Demand) -> bool:
        """Whether every node without room for `other` has no room for this demand either."""
        more = self.need.landing >= other.need.landing and self.need.whole >= other.need.whole
        return more and self.avoid == other.avoid


@dataclass(frozen=True, slots=True)
class Ageing:
    """Limits within which others may pass a request that does not fit."""

    ageing_s: float
    max_passed: int

    def over(self, ticket: Ticket, now: float) -> bool:
        """Whether nobody may pass it any more."""
        return now - ticket.since >= self.ageing_s or ticket.passed >= self.max_passed


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in line, when it joined, and how many have passed it."""

    demand: Demand
    since: float
    passed: int = 0


def next_in_line(
    line: Sequence[Ticket],
    fits: Callable[[Demand], bool],
    could_fit: Callable[[Demand], bool],
    now: float,
    ageing: Ageing,
) -> int | None:
    """Index of the ticket to serve now, or None.

    `fits` tells whether there is room now, `could_fit` whether there is room once other requests end. A demand that
    needs no less than one refused just before is not tried, so a long line costs little.
    """
    refused: Demand | None = None
    for index, ticket in enumerate(line):
        if refused is None or not ticket.demand.is_no_less_than(refused):
            if fits(ticket.demand):
                return index
            refused = ticket.demand
        if ageing.over(ticket, now) and could_fit(ticket.demand):
            return None
    return None


class Held(Protocol):
    """A share of a node, which requests wait for."""

    def release(self) -> None:
        """Give the share back."""
        ...


HeldT = TypeVar("HeldT", bound=Held)
HeldT_co = TypeVar("HeldT_co", bound=Held, covariant=True)


class Desk(Protocol[HeldT_co]):
    """Gives out shares of nodes."""

    def fits(self, demand: Demand) -> bool:
        """Whether a share can be had now."""
        ...

    def could_fit(self, demand: Demand) -> bool:
        """Whether a share can be had once other requests give theirs back."""
        ...

    def take(self, demand: Demand) -> HeldT_co | None:
        """Give a share out; None if the demand does not fit."""
        ...


class _Waiter(Ticket, Generic[HeldT]):
    def __init__(self, demand: Demand, since: float) -> None:
        super().__init__(demand, since)
        self.served: asyncio.Future[HeldT] = asyncio.get_running_loop().create_future()


class Line(Generic[HeldT]):
    """Requests in line. The owner calls `serve` whenever there may be room."""

    def __init__(self, desk: Desk[HeldT], ageing: Ageing, now: Callable[[], float]) -> None:
        self._desk, self._ageing, self._now = desk, ageing, now
        self._waiters: list[_Waiter[HeldT]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def try_now(self, demand: Demand) -> HeldT | None:
        """A share, if one can be had without waiting; else None."""
        if not self._waiters:
            return self._desk.take(demand)
        waiter = self._join(demand)
        if waiter.served.done():
            return waiter.served.result()
        self._waiters.remove(waiter)
        return None

    async def wait(self, demand: Demand) -> HeldT:
        """Stand in line."""
        if not self._waiters and (held := self._desk.take(demand)) is not None:
            return held
        waiter = self._join(demand)
        try:
            return await waiter.served
        except asyncio.CancelledError:
            # The waiter was served and then cancelled before it woke up: its share must not stay held.
            if waiter.served.done() and not waiter.served.cancelled():
                waiter.served.result().release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.serve()

    def serve(self) -> None:
        """Give out the shares that can be had now."""
        desk = self._desk
        while True:
            index = next_in_line(self._waiters, desk.fits, desk.could_fit, self._now(), self._ageing)
            if index is None:
                return
            for passed in self._waiters[:index]:
                passed.passed += 1
            waiter = self._waiters.pop(index)
            if not waiter.served.done():  # cancelled, and not yet awake
                held = desk.take(waiter.demand)
                assert held is not None, "it fits"
                waiter.served.set_result(held)

    def _join(self, demand: Demand) -> _Waiter[HeldT]:
        waiter: _Waiter[HeldT] = _Waiter(demand, self._now())
        insort(self._waiters, waiter, key=lambda ticket: ticket.demand.serial)
        self.serve()
        return waiter
