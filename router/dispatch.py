"""One request's life: attempts until one succeeds, or until it makes no sense to go on."""

from __future__ import annotations

import asyncio

from hackkv.errors import DeadlineExceeded, NodeLost, Overloaded, TransferError, Unavailable
from hackkv.types import Role
from router.attempt import Attempt
from router.failover import Failovers
from router.fleet import Fleet
from router.flight import Flight
from router.lifecycle import Deadlines, Stalled
from router.metrics import Metrics
from router.scopes import deadline
from router.states import State

MAX_FAILOVERS = 3


class Dispatcher:
    """Serves flights on the fleet. `close` is the beginning of its end."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        deadlines: Deadlines,
        max_inflight: int = 4096,
        max_failovers: int = MAX_FAILOVERS,
    ) -> None:
        self.fleet = fleet
        self._metrics, self._deadlines = metrics, deadlines
        self._max_inflight, self._max_failovers = max_inflight, max_failovers
        self.inflight = 0
        self.closing = False
        """No new requests are taken."""
        self._idle = asyncio.Event()
        self._limits: set[asyncio.Timeout] = set()

    async def serve(self, flight: Flight) -> None:
        """Bring one sequence to its end. Raises the error that ended it instead.

        Nodes and transfers may fail `max_failovers` times under it, nodes that drain do not count; what the client
        already has is not sent again. Cancelling closes both legs and gives back everything that was booked.
        """
        if self.closing:
            raise Unavailable("the router is about to stop")
        if self.inflight >= self._max_inflight:
            raise Overloaded("too many requests in flight", self.fleet.retry_after_s)
        flight.turn = self.fleet.next_turn()
        flight.life.on_illegal = self._metrics.moved_illegally
        self.inflight += 1
        self._metrics.entered()
        try:
            await self._serve(flight)
        except BaseException:
            flight.life.move(State.FAILED)
            raise
        else:
            flight.life.move(State.DONE)
        finally:
            self.inflight -= 1
            self._metrics.left()
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
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(now)
            await self._idle.wait()

    async def _serve(self, flight: Flight) -> None:
        try:
            async with deadline(self._deadlines.total_s, "the request") as limit:
                self._limits.add(limit)
                try:
                    async with flight.life.timed(self._deadlines, flight.need.whole):
                        await self._try_until_served(flight)
                finally:
                    self._limits.discard(limit)
        except DeadlineExceeded as error:
            if self.closing and limit.expired():
                raise Unavailable("the router stopped before the request was complete") from error
            raise

    async def _try_until_served(self, flight: Flight) -> None:
        failovers = Failovers(flight, self._max_failovers, self._metrics.failed_over)
        avoid: frozenset[str] = frozenset()
        refusals: set[str] = set()
        while True:
            attempt = Attempt(flight, self.fleet, failovers, avoid)
            try:
                await attempt.run()
            except (NodeLost, TransferError, Stalled) as error:
                if flight.complete:
                    return
                failovers.survive(error)
            except Overloaded as error:
                if not attempt.prefill_refused:
                    raise
                refusals.add(flight.prefill_node)
                if {member.node_id for member in self.fleet.members(Role.PREFILL)} <= refusals:
                    if not flight.token_ids:
                        raise
                    # The client has tokens already, so it cannot be told to come back later: we do, in its place.
                    await asyncio.sleep(error.retry_after_s)
                    refusals.clear()
                failovers.survive(error)
            else:
                return
            avoid = frozenset(attempt.to_avoid)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
