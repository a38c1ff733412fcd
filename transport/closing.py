"""Ends what a call leaves behind: iterators and tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def closing(source: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close `source` on the way out if it is a generator, so that its `finally` runs now and not at collection."""
    try:
        yield source
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()


async def reap(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over. Their outcome is dropped: the caller has taken what it needs."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not report it
