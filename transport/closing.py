"""Ends the iterators and tasks that a call leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def closing(source: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close `source` on the way out if it can be closed: a generator's `finally` runs now, not at collection."""
    try:
        yield source
    finally:
        if (aclose := getattr(source, "aclose", None)) is not None:
            await aclose()


async def reap(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over. Their outcomes are dropped."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not report it
