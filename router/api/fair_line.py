"""A fair line for work that many clients want: start-time fair queueing (Goyal, Vin and Cheng 1996).

Each client has a virtual time, which advances by the cost of its work. The next job is that of the client with the
least virtual time. So a client with a hundred large jobs counts as one client beside another with a small job. Large
jobs never have all places, so a small job need not wait until a large one ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from hackkv.errors import Overloaded

LARGE: Final = 1 << 18
"""Cost from which a job counts as large."""


@dataclass(eq=False, slots=True)
class _Wait:
    cost: int
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class _Client:
    at: float
    """The client's virtual time: the cost of the work that it has had."""
    waiting: deque[_Wait] = field(default_factory=deque)
    working: int = 0


class FairLine:
    """Gives `places` to jobs of clients; `spare` of them never to large jobs."""

    def __init__(self, places: int, max_waiting: int, spare: int = 1) -> None:
        """At most `max_waiting` jobs wait. With one place there is none to spare."""
        self._free, self._free_large = places, max(1, places - spare)
        self._max_waiting = max_waiting
        self._clients: dict[str, _Client] = {}
        self._now = 0.0
        self.waiting = 0

    @asynccontextmanager
    async def place(self, client: str, cost: int) -> AsyncIterator[None]:
        """Wait for a place, hold it in the block. Raises `Overloaded` if the line is full.

        No client may fill more than half of the line.
        """
        owner = self._clients.setdefault(client, _Client(self._now))
        if self.waiting >= self._max_waiting or len(owner.waiting) >= max(1, self._max_waiting // 2):
            self._forget()
            raise Overloaded("too many large requests wait to be read")
        wait = _Wait(cost, asyncio.get_running_loop().create_future())
        owner.waiting.append(wait)
        self.waiting += 1
        self._hand_out()
        try:
            await wait.admitted
            yield
        finally:
            self._leave(client, wait)
            self._hand_out()

    def _leave(self, client: str, wait: _Wait) -> None:
        owner = self._clients[client]
        if wait in owner.waiting:
            owner.waiting.remove(wait)
            self.waiting -= 1
        else:
            owner.working -= 1
            self._free += 1
            self._free_large += wait.cost >= LARGE
        self._forget()

    def _hand_out(self) -> None:
        """Give free places to the jobs that are next."""
        while self._free > 0 and (candidates := [one for one in self._clients.values() if self._can_begin(one)]):
            owner = min(candidates, key=lambda one: one.at)
            wait = next(wait for wait in owner.waiting if self._fits(wait))
            owner.waiting.remove(wait)
            self.waiting -= 1
            owner.working += 1
            self._free -= 1
            self._free_large -= wait.cost >= LARGE
            self._now = max(self._now, owner.at)
            owner.at = max(self._now, owner.at) + wait.cost
            wait.admitted.set_result(None)

    def _can_begin(self, owner: _Client) -> bool:
        return any(self._fits(wait) for wait in owner.waiting)

    def _fits(self, wait: _Wait) -> bool:
        return not wait.admitted.done() and (wait.cost < LARGE or self._free_large > 0)

    def _forget(self) -> None:
        """Drop clients that want nothing. A client that is ahead stays until the line is idle. Otherwise it would
        return with a clean record."""
        busy = {name: one for name, one in self._clients.items() if one.waiting or one.working}
        ahead = {name: one for name, one in self._clients.items() if one.at > self._now} if busy else {}
        self._clients = {**ahead, **busy}
