"""One request's way through `router.states`: where it is now, and the one timer that says how long it may stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hackkv.errors import DeadlineExceeded
from hackkv.timing import Stage
from router.states import TABLE, State, allowed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request may stay in one state, in seconds; the fields are those that `router.states` names."""

    queue_s: float = 120.0
    prefill_s: float = 300.0
    offer_s: float = 10.0
    transfer_s: float = 60.0
    transfer_ktoken_s: float = 1.0
    landed_s: float = 120.0
    token_s: float = 60.0
    swapped_s: float = 300.0
    total_s: float = 1800.0

    def of(self, state: State, kv_tokens: int) -> float | None:
        """Seconds that a request whose KV holds `kv_tokens` tokens may stay; None for as long as it likes."""
        name = TABLE[state].deadline
        if name is None:
            return None
        seconds: float = getattr(self, name)
        return seconds + self.transfer_ktoken_s * kv_tokens / 1000 if state is State.TRANSFERRING else seconds


class Stalled(DeadlineExceeded):
    """A decode node kept a request in one state for too long: another may do better."""


class Lifecycle:
    """The state of one request. A move that the table does not know is reported, and made all the same."""

    def __init__(self) -> None:
        self.state = State.QUEUED
        self.on_illegal: Callable[[State, State], None] = lambda now, to: None
        self.on_stall: Callable[[Stalled], None] | None = None
        """Called when a state's time is up in which another node may be tried; None while there is no node to leave."""
        self._deadlines, self._kv_tokens = Deadlines(), 0
        self._limit: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stage(self) -> Stage:
        """Where time is booked that no worker accounts for."""
        return TABLE[self.state].stage

    def move(self, to: State) -> None:
        """Enter a state, or renew it; its time runs from now."""
        if not allowed(self.state, to):
            log.error("a request went from %s to %s, which no rule allows", self.state, to)
            self.on_illegal(self.state, to)
        self.state = to
        self._arm()

    @asynccontextmanager
    async def timed(self, deadlines: Deadlines, kv_tokens: int) -> AsyncIterator[None]:
        """Raise `DeadlineExceeded` when a state outlives its deadline within the block."""
        self._deadlines, self._kv_tokens = deadlines, kv_tokens
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                self._arm()
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(self._too_long()) from error
        finally:
            self._limit = None
            self._disarm()

    def _arm(self) -> None:
        self._disarm()
        seconds = self._deadlines.of(self.state, self._kv_tokens)
        if self._limit is not None and seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._time_is_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        if TABLE[self.state].retried and self.on_stall is not None:
            self.on_stall(Stalled(self._too_long()))
        elif self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _too_long(self) -> str:
        return f"the request was {self.state} for longer than {self._deadlines.of(self.state, self._kv_tokens):g} s"
