"""The client of an HTTP request, which may leave before the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from hackkv.errors import Cancelled, HackkvError
from router.scopes import guarded
from transport.closing import reap

T = TypeVar("T")


class Caller:
    """The client of one request, whose body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def left(self) -> None:
        """Wait until the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the client leaves first, `work` is cancelled and `Cancelled` is raised."""
        alarm = asyncio.ensure_future(self._error())
        try:
            return await guarded(work, alarm)
        finally:
            await reap(alarm)

    async def _error(self) -> HackkvError:
        await self.left()
        return Cancelled("the client left")
