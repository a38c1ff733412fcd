"""Admission of requests, their overall deadline, and the router's end. `router.life.request` is all in between."""

from __future__ import annotations

import asyncio
from typing import Protocol

from hackkv.errors import DeadlineExceeded, Overloaded, Unavailable
from router.config import DeadlinesConfig, LimitsConfig
from router.fleet.fleet import Fleet
from router.life.failover import Cause, Failovers, Remedy
from router.life.flight import Flight
from router.life.request import serve
from router.life.states import RequestState
from router.scopes import deadline

_DEADLINES, _LIMITS = DeadlinesConfig(), LimitsConfig()


class Observer(Protocol):
    """Hears what happens to requests, and changes nothing."""

    def entered(self) -> None:
        """A request was taken in; `left` follows."""
        ...

    def left(self) -> None:
        """A request is over, whether it was served or failed."""
        ...

    def failed_over(self, remedy: Remedy, cause: Cause) -> None:
        """A request goes on with other nodes."""
        ...


class Dispatcher:
    """Serves flights on the fleet until `close`."""

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        deadlines: DeadlinesConfig = _DEADLINES,
        limits: LimitsConfig = _LIMITS,
    ) -> None:
        self.fleet = fleet
        self._observer, self._deadlines, self._limits = observer, deadlines, limits
        self.inflight = 0
        self.closing = False
        """Whether new requests are refused."""
        self._idle = asyncio.Event()
        self._scopes: set[asyncio.Timeout] = set()
        """The overall deadline of each request in flight. `close` moves it to now, which ends the request."""

    async def serve(self, flight: Flight) -> None:
        """Bring one sequence to its end. Raises the error that ended it instead.

        The sequence survives `max_failovers` lost nodes, failed transfers and missed deadlines; nodes that drain do not
        count. The client gets no token twice. Cancelling closes both legs and gives back everything that was booked.
        """
        if self.closing:
            raise Unavailable("the router is about to stop")
        if self.inflight >= self._limits.max_inflight:
            raise Overloaded("too many requests in flight", self.fleet.decode.retry_after_s)
        flight.serial = self.fleet.next_serial()
        self.inflight += 1
        self._observer.entered()
        try:
            await self._serve_in_time(flight)
            flight.life.move(RequestState.DONE)
        except BaseException:
            flight.life.move(RequestState.FAILED)
            raise
        finally:
            self.inflight -= 1
            self._observer.left()
            if self.inflight == 0:
                self._idle.set()

    async def close(self, grace_s: float) -> None:
        """Take no new requests, give those in flight `grace_s` seconds to end, then end them with `Unavailable`."""
        self.closing = True
        if self.inflight == 0:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            for scope in self._scopes:
                if not scope.expired():
                    scope.reschedule(now)
            await self._idle.wait()

    async def _serve_in_time(self, flight: Flight) -> None:
        failovers = Failovers(flight, self._limits.max_failovers, self._observer.failed_over)
        try:
            async with deadline(self._deadlines.total_s, "the request") as scope:
                self._scopes.add(scope)
                try:
                    async with flight.life.timed(self._deadlines, flight.need.whole):
                        await serve(flight, self.fleet, failovers)
                finally:
                    self._scopes.discard(scope)
        except DeadlineExceeded as error:
            if self.closing and scope.expired():
                raise Unavailable("the router stopped before the request was complete") from error
            raise
