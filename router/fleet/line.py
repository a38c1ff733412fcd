"""The line for room on a node: requests wait, and `router.fleet.order` says who is next."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from router.fleet.order import Ageing, Demand, Ticket, next_in_line


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
