"""Structured concurrency: `asyncio.TaskGroup` and `asyncio.timeout` with this project's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from typing import Any, TypeVar

from hackkv.errors import DeadlineExceeded, HackkvError
from transport.closing import reap

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
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def guarded(work: Coroutine[Any, Any, T], *alarms: asyncio.Future[HackkvError]) -> T:
    """The result of `work`. If an alarm goes off first, `work` is cancelled and the alarm's error is raised."""
    task = asyncio.ensure_future(work)
    try:
        waits: set[asyncio.Future[Any]] = {task, *alarms}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for alarm in alarms:
            if alarm.done() and not task.done():
                raise copy(alarm.result())  # many tasks hear the same alarm
        return task.result()
    finally:
        await reap(task)
