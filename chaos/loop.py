"""An event loop on a virtual clock. When nothing is left to do, its time jumps to the next timer.

So a lease of three seconds costs nothing. A cluster that waits for something that never comes is detected at once:
nothing is ready and no timer is set (`Deadlock`). Functions for a thread run on the loop's thread, between two
callbacks, and take a seeded amount of the loop's time. So the seed determines the order of all events.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and no timer is set, so no task can ever go on."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual. `work_s` is the mean time of a function for a thread, in virtual seconds."""

    def __init__(self, seed: int = 0, work_s: float = 0.01) -> None:
        self._virtual_s = 0.0
        self._work_s, self._chance = work_s, random.Random(seed)
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual_s

    def skip(self, seconds: float) -> None:
        """Advance the time."""
        self._virtual_s += seconds

    def run_in_executor(  # type: ignore[override]  # the stub wants TypeVarTuple, whose support differs by version
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` on this thread, 0.5 to 1.5 times `work_s` from now. Cancelling the future does not stop it."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits, as an executor does
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._work_s * (0.5 + self._chance.random()), work)
        return future


class _Skipping(selectors.SelectSelector):
    """A selector that advances the loop's time instead of sleeping."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are ready, without waiting. Raises `Deadlock` when there is nothing to wait for."""
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock("nothing is ready and no timer is set")
            self._loop.skip(timeout)
        return events


def run(main: Coroutine[Any, Any, T], seed: int = 0, *, virtual: bool = True) -> T:
    """Run `main` to its end on a new loop. Unless `virtual`, the loop has the real clock."""
    with asyncio.Runner(loop_factory=(lambda: VirtualLoop(seed)) if virtual else None) as runner:
        return runner.run(main)
