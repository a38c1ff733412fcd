"""Ends what a call leaves behind: iterators and tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Closable(Protocol):
    """An iterator that holds something until it is closed, as a generator does."""

    async def aclose(self) -> None:
        """Give it back."""
        ...


@contextlib.asynccontextmanager
async def closing(source: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close `source` on the way out if it can be closed: a generator's `finally` then runs now and not at collection."""
    try:
        yield source
    finally:
        if isinstance(source, Closable):
            await source.aclose()


async def reap(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over. Their outcome is dropped: the caller has taken what it needs."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not report it
