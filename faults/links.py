"""Links that suffer a fault plan. Their calls block threads; rules strike on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar

from faults.injector import Injector
from faults.plan import Point
from hackkv.errors import NodeLost
from hackkv.types import Payload
from transport.link import Exchange, Link, LinkKind

T = TypeVar("T")


def faulty_links(faults: Injector) -> Callable[[LinkKind], LinkKind]:
    """A function that makes a kind of link suffer `faults`, for `transport.wires.Site.links`."""
    return lambda kind: replace(kind, open=lambda rank, host: FaultyLink(kind.open(rank, host), faults))


class FaultyLink:
    """A `Link` under a plan. It belongs to the event loop that made it."""

    def __init__(self, link: Link, faults: Injector) -> None:
        self._link, self._faults = link, faults
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._striking: set[Future[Any]] = set()
        self._over = False

    def connect(self, exchange: Exchange) -> None:
        """See `Link`."""
        self._suffer(self._faults.reach(Point.CONNECT, ""))
        self._link.connect(exchange)

    def post(self, size: int) -> Callable[[], Payload]:
        """See `Link`."""
        arrived = self._link.post(size)

        def wait() -> Payload:
            self._suffer(self._faults.reach(Point.ARRIVING, ""))
            payload = arrived()
            self._suffer(self._faults.reach(Point.ARRIVED, ""))
            return payload

        return wait

    def send(self, payload: Payload) -> None:
        """See `Link`."""
        self._link.send(self._suffer(self._faults.reach_parcel(payload)))
        self._suffer(self._faults.reach(Point.SENT, ""))

    def abort(self) -> None:
        """See `Link`. Ends calls that a rule delays or stalls."""
        with self._lock:
            self._over = True
            striking = list(self._striking)
        for strike in striking:
            strike.cancel()
        self._link.abort()

    def _suffer(self, strike: Coroutine[Any, Any, T]) -> T:
        """Run `strike` on the event loop and wait. Raises its errors, or `NodeLost` if the link is aborted."""
        with self._lock:
            if self._over:
                strike.close()
                raise NodeLost("the link is closed")
            future = asyncio.run_coroutine_threadsafe(strike, self._loop)
            self._striking.add(future)
        try:
            return future.result()
        except CancelledError:
            raise NodeLost("the link is closed") from None
        finally:
            with self._lock:
                self._striking.discard(future)
