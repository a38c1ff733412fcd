"""One request's life: attempts on pairs of nodes until one succeeds, or until it makes no sense to go on."""

from __future__ import annotations

import asyncio
import logging

from hackkv.errors import NodeLost, Overloaded, TransferError, Unavailable
from hackkv.types import Role
from router.attempt import Attempt, Deadlines
from router.fleet import Fleet
from router.flight import Flight
from router.metrics import Metrics, RetryReason
from router.scopes import deadline

log = logging.getLogger(__name__)

RETRIES = 1
"""Failures of nodes or transfers that a request survives."""


class Dispatcher:
    """Serves flights on the fleet."""

    def __init__(self, fleet: Fleet, metrics: Metrics, deadlines: Deadlines, max_inflight: int = 4096) -> None:
        self.fleet = fleet
        self._metrics, self._deadlines, self._max_inflight = metrics, deadlines, max_inflight
        self.inflight = 0

    async def serve(self, flight: Flight) -> None:
        """Bring one sequence to its end. Raises the error that ended it instead.

        A node or transfer that fails is retried once on another pair, with a new epoch; what the client already has
        is not sent again. Cancelling closes both legs and gives back everything that was booked.
        """
        if self.inflight >= self._max_inflight:
            raise Overloaded("too many requests in flight", self.fleet.retry_after_s)
        self.inflight += 1
        self._metrics.entered()
        try:
            async with deadline(self._deadlines.total_s, "the request"):
                await self._try_until_served(flight)
        finally:
            self.inflight -= 1
            self._metrics.left()

    async def _try_until_served(self, flight: Flight) -> None:
        avoid: set[str] = set()
        refusals: set[str] = set()
        failure: NodeLost | TransferError | None = None
        while True:
            attempt = Attempt(flight, self.fleet, self._deadlines, epoch=flight.attempts, avoid=frozenset(avoid))
            flight.attempts += 1
            try:
                await attempt.run()
            except (NodeLost, TransferError) as error:
                if flight.complete:
                    return
                if failure is not None:
                    raise
                failure = error
                avoid |= attempt.nodes
                self._retrying(flight, RetryReason.FAILED, error)
            except Overloaded as error:
                refusals.add(flight.prefill_node)
                prefill_nodes = {member.node_id for member in self.fleet.members(Role.PREFILL)}
                if not attempt.prefill_refused or prefill_nodes <= refusals:
                    raise
                avoid.add(flight.prefill_node)
                self._retrying(flight, RetryReason.PREFILL_FULL, error)
            except Unavailable as error:
                if failure is None:
                    raise
                raise failure from error
            else:
                return
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError

    def _retrying(self, flight: Flight, reason: RetryReason, error: Exception) -> None:
        log.warning("request %s, attempt %d: %s; trying again", flight.request.request_id, flight.attempts, error)
        self._metrics.retried(reason)
