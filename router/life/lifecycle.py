"""One request's state in the table `router.life.states`, and the one timer of that state's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter

from hackkv.errors import DeadlineExceeded
from hackkv.timing import Stage
from router.config import DeadlinesConfig
from router.life.states import TABLE, RequestState, allowed

_DEADLINES = DeadlinesConfig()


class Stalled(DeadlineExceeded):
    """A decode node kept a request in one state for too long: another may do better."""


class IllegalMove(RuntimeError):
    """This program tried a move that the table lacks. The request stays in the state that it was in."""


def limit_s(deadlines: DeadlinesConfig, state: RequestState, kv_tokens: int) -> float | None:
    """Seconds that a request whose KV holds `kv_tokens` tokens may stay in a state; None is no limit."""
    name = TABLE[state].deadline
    if name is None:
        return None
    seconds: float = getattr(deadlines, name)
    return seconds + deadlines.transfer_ktoken_s * kv_tokens / 1000 if state is RequestState.TRANSFERRING else seconds


class Lifecycle:
    """The state of one request, which only `move` and `ahead` change, and only as the table allows.

    While the prompt is computed, the decode side may be ahead: it waits for room, or holds it and receives pages. The
    request stays `prefilling` until token 0, and `catch_up` then moves it to where the decode side is.
    """

    def __init__(self) -> None:
        self._state = RequestState.QUEUED
        self.marks: list[tuple[RequestState, float]] = []
        """Every state that the request came into, and when, on `perf_counter`."""
        self._ahead: RequestState | None = None
        self.on_stall: Callable[[Stalled], None] | None = None
        """Called when the deadline of a `retried` state passes. None while the request has no decode node to leave."""
        self._deadlines, self._kv_tokens = _DEADLINES, 0
        self._limit_s: float | None = None
        """The limit of the state that the request is in."""
        self._scope: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    @property
    def state(self) -> RequestState:
        """The state of the request."""
        return self._state

    @property
    def stage(self) -> Stage:
        """The stage that gets time for which no worker accounts."""
        return TABLE[self._state].stage

    def move(self, to: RequestState) -> None:
        """Enter a state, or renew it; its time runs from now. Raises `IllegalMove`."""
        if to is not self._state or not self.marks:
            _check(self._state, to)
            self.marks.append((to, perf_counter()))
            self._state = to
            self._limit_s = limit_s(self._deadlines, to, self._kv_tokens)
        self._ahead = None
        self._arm()

    def ahead(self, to: RequestState) -> None:
        """The decode side enters a state; so does the request, unless it is still prefilling. Raises `IllegalMove`."""
        if self._state is not RequestState.PREFILLING:
            self.move(to)
            return
        _check(self._ahead or self._state, to)
        self._ahead = to

    def catch_up(self) -> None:
        """Prefill is over: the request is where the decode side is."""
        if self._ahead is not None:
            self.move(self._ahead)

    @asynccontextmanager
    async def timed(self, deadlines: DeadlinesConfig, kv_tokens: int) -> AsyncIterator[None]:
        """Raise `DeadlineExceeded` when a state outlives its deadline within the block."""
        self._deadlines, self._kv_tokens = deadlines, kv_tokens
        self._limit_s = limit_s(deadlines, self._state, kv_tokens)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                self._arm()
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(self._too_long()) from error
        finally:
            self._scope = None
            self._disarm()

    def _arm(self) -> None:
        """Start the state's deadline. A timer that rings earlier may stay: it then compares the time and goes on."""
        seconds = self._limit_s
        if self._scope is None or seconds is None:
            self._disarm()
            return
        loop = asyncio.get_running_loop()
        self._due = loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due:
            self._disarm()
            self._timer = loop.call_at(self._due, self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._due, self._ring) if loop.time() < self._due else None
        if self._timer is None:
            self._time_is_up(loop.time())

    def _time_is_up(self, now: float) -> None:
        if TABLE[self._state].retried and self.on_stall is not None:
            self.on_stall(Stalled(self._too_long()))
        elif self._scope is not None and not self._scope.expired():
            self._scope.reschedule(now)

    def _too_long(self) -> str:
        return f"the request was {self._state} for longer than {self._limit_s:g} s"


def _check(now: RequestState, to: RequestState) -> None:
    if not allowed(now, to):
        raise IllegalMove(f"a request cannot go from {now} to {to}")
