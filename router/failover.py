"""How much failure a request survives, and what is counted of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum

from hackkv.errors import NodeDraining, NodeLost, Overloaded, TransferError
from router.flight import Flight
from router.lifecycle import Stalled

log = logging.getLogger(__name__)


class Kind(StrEnum):
    """How a request went on."""

    REDISPATCHED = "redispatched"
    """The client had nothing yet: the prompt went to another pair of nodes."""
    REASSIGNED = "reassigned"
    """The prefill node still had the KV and sent it to another decode node."""
    PREFILLED = "prefilled"
    """The KV was gone: the prompt was prefilled again, for the tokens after those that the client had."""


class Cause(StrEnum):
    """Why it had to."""

    LOST = "lost"
    TRANSFER = "transfer"
    STALLED = "stalled"
    DRAINING = "draining"
    EVICTED = "evicted"
    FULL = "full"


class KvGone(TransferError):
    """The prefill node let go of KV that was still needed: nobody's fault, and the prompt is prefilled again."""


Failure = NodeLost | TransferError | Stalled
"""What other nodes may be spared."""

_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (NodeDraining, Cause.DRAINING),
    (NodeLost, Cause.LOST),
    (KvGone, Cause.EVICTED),
    (TransferError, Cause.TRANSFER),
    (Stalled, Cause.STALLED),
    (Overloaded, Cause.FULL),
)
_FAULTS = frozenset({Cause.LOST, Cause.TRANSFER, Cause.STALLED})
"""Only these could be the request's own doing."""

Count = Callable[[Kind, Cause], None]


class Failovers:
    """One request's budget: a request that kills nodes must not kill the whole fleet."""

    def __init__(self, flight: Flight, limit: int, count: Count) -> None:
        self._flight, self._limit, self._count = flight, limit, count
        self.faults = 0
        """Nodes lost, transfers failed and deadlines missed under this request."""

    def survive(self, error: Failure | Overloaded, kind: Kind | None = None) -> None:
        """Note that the request goes on after `error`, as `kind`. Raises it instead when the budget is spent."""
        cause = next(cause for cls, cause in _CAUSES if isinstance(error, cls))
        self.faults += cause in _FAULTS
        if self.faults > self._limit:
            raise error
        self._flight.attempts += 1
        kind = kind or (Kind.PREFILLED if self._flight.token_ids else Kind.REDISPATCHED)
        log.warning("request %s: %s; %s", self._flight.request.request_id, error, kind)
        self._count(kind, cause)
