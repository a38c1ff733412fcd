"""Failures that a request survives, the nodes that it avoids after them, and their counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from hackkv.errors import NodeDraining, NodeLost, Overloaded, TransferError
from router.life.flight import Flight
from router.life.lifecycle import Stalled

log = logging.getLogger(__name__)


class Remedy(StrEnum):
    """The way in which a request went on after a failure."""

    REDISPATCHED = "redispatched"
    """The client had nothing yet: the prompt went to another pair of nodes."""
    REASSIGNED = "reassigned"
    """The prefill node still had the KV and sent it to another decode node."""
    PREFILLED = "prefilled"
    """The KV was gone: the prompt was prefilled again, for the tokens after those that the client had."""


class Cause(StrEnum):
    """Why a request went on with other nodes."""

    LOST = "lost"
    TRANSFER = "transfer"
    STALLED = "stalled"
    DRAINING = "draining"
    EVICTED = "evicted"
    FULL = "full"


class KvGone(TransferError):
    """The prefill node let go of KV that was still needed. No node is at fault; the prompt is prefilled again."""


class PrefillFull(Overloaded):
    """A prefill node takes no prompt now. Another node may."""


FAILURES = (NodeLost, TransferError, Stalled)
Failure = NodeLost | TransferError | Stalled
"""Failures after which a request goes on with other nodes."""

_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (NodeDraining, Cause.DRAINING),
    (NodeLost, Cause.LOST),
    (KvGone, Cause.EVICTED),
    (TransferError, Cause.TRANSFER),
    (Stalled, Cause.STALLED),
    (PrefillFull, Cause.FULL),
)
_FAULTS = frozenset({Cause.LOST, Cause.TRANSFER, Cause.STALLED})
"""Causes that count against the budget: only these can be caused by the request itself."""

Count = Callable[[Remedy, Cause], None]


class Failovers:
    """One request's budget: a request that kills nodes must not kill the whole fleet."""

    def __init__(self, flight: Flight, limit: int, count: Count) -> None:
        self._flight, self._limit, self._count = flight, limit, count
        self._faults = 0
        """Nodes lost, transfers failed and deadlines missed under this request."""
        self._refused: set[str] = set()
        """Prefill nodes that have refused the request since it last waited for them."""
        self.avoid: set[str] = set()
        """Nodes that failed the request, or had no room for it."""

    def survive(self, error: Failure | PrefillFull, remedy: Remedy | None = None) -> None:
        """Note that the request goes on after `error`, and how. Raises it instead when the budget is spent."""
        cause = next(cause for cls, cause in _CAUSES if isinstance(error, cls))
        self._faults += cause in _FAULTS
        if self._faults > self._limit:
            raise error
        self._flight.route.attempts += 1
        remedy = remedy or (Remedy.PREFILLED if self._flight.output.token_ids else Remedy.REDISPATCHED)
        log.warning("request %s: %s; %s", self._flight.request.request_id, error, remedy)
        self._count(remedy, cause)

    async def survive_refusal(self, error: PrefillFull, prefill_nodes: frozenset[str]) -> None:
        """Note that a prefill node was full and another is tried.

        When all were full, a client without tokens is told to come back later. A client that has tokens cannot do so,
        and the router waits for it.
        """
        self._refused.add(self._flight.route.prefill_node)
        if prefill_nodes <= self._refused:
            if not self._flight.output.token_ids:
                raise error
            await asyncio.sleep(error.retry_after_s)
            self._refused.clear()
        self.survive(error)
