"""Structured concurrency: `asyncio.TaskGroup` and `asyncio.timeout` with this project's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from typing import Any, TypeVar

from hackkv.errors import DeadlineExceeded, HackkvError

T = TypeVar("T")


@asynccontextmanager
async def deadline(seconds: float | None, doing: str) -> AsyncIterator[asyncio.Timeout]:
    """Raise `DeadlineExceeded` if the block takes longer. None is no limit until the yielded timeout is rescheduled."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"{doing} took too long") from error
        raise


@contextmanager
def unwrapped() -> Iterator[None]:
    """Let a task group fail with the error that made it fail.

    The first failure cancels the other tasks, so later errors only follow from it. The body of the group must not end
    before its tasks: Python 3.11 counts a failure after that as a cancellation of the parent, and never uncounts it.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # Cancelled and failed at the same moment: the task group has dropped the cancellation, we must not.
            raise asyncio.CancelledError from group
        group.__traceback__ = None  # its frames have the group itself: a cycle, for the garbage collector to find
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class Alarm:
    """An error that any number of tasks heed while they work (`guarded`). It goes off once."""

    def __init__(self) -> None:
        self._error: HackkvError | None = None
        self._heeding: dict[object, Callable[[], None]] = {}

    def ring(self, error: HackkvError) -> None:
        """Go off. If it has gone off before, this changes nothing."""
        if self._error is None:
            self._error = error
            for stop in tuple(self._heeding.values()):
                stop()

    def done(self) -> bool:
        """Whether it has gone off."""
        return self._error is not None

    def result(self) -> HackkvError:
        """The error. Call it when the alarm has gone off."""
        assert self._error is not None
        return self._error

    def heed(self, key: object, stop: Callable[[], None]) -> None:
        """Have `stop` called when it goes off, until `ignore` is called with the same `key`."""
        self._heeding[key] = stop

    def ignore(self, key: object) -> None:
        """Forget what `heed` was given with this key."""
        self._heeding.pop(key, None)


async def guarded(work: Coroutine[Any, Any, T], *alarms: Alarm) -> T:
    """The result of `work`. If an alarm goes off first, `work` is cancelled and the alarm's error is raised.

    As with `asyncio.timeout`, the work is cancelled in the present task: one of its own would cost more than most work.
    """
    task, loop, key = asyncio.current_task(), asyncio.get_running_loop(), object()
    assert task is not None
    before, stopped = task.cancelling(), False

    def stop() -> None:
        nonlocal stopped
        if task is not None and not stopped:
            stopped = True
            task.cancel()

    def heed() -> None:
        loop.call_soon(loop.call_soon, stop)  # what a node has sent just before it went is heard first

    if any(alarm.done() for alarm in alarms):
        work.close()
        raise _loudest(alarms)
    for alarm in alarms:
        alarm.heed(key, heed)
    try:
        return await work
    except asyncio.CancelledError:
        if stopped and task.cancelling() == before + 1:  # by us, and by nobody else
            raise _loudest(alarms) from None
        raise
    finally:
        if stopped:
            task.uncancel()
        task = None  # an error that ends it keeps this frame: a cycle, for the garbage collector to find
        for alarm in alarms:
            alarm.ignore(key)


def _loudest(alarms: Sequence[Alarm]) -> HackkvError:
    """The error of the first alarm that has gone off: a copy, since many tasks heed the same alarm."""
    return copy(next(alarm.result() for alarm in alarms if alarm.done()))
