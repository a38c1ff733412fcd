"""The client of an HTTP request, which may leave before the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from hackkv.errors import Cancelled
from router.scopes import Alarm, guarded
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
        alarm = Alarm()
        watching = asyncio.create_task(self._tell(alarm))
        try:
            return await guarded(work, alarm)
        finally:
            await reap(watching)

    async def _tell(self, alarm: Alarm) -> None:
        await self.left()
        alarm.ring(Cancelled("the client left"))
