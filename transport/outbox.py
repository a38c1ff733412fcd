"""Small items share a message if they are put together: a message costs more than its contents."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

MESSAGE_BYTES: Final = 256 << 10
"""The most bytes of a message with several items. A larger item travels alone."""
WAITING_BYTES: Final = 4 << 20
"""Bytes that may wait for a slow peer. Above them `room` makes callers wait."""
PATIENCE_S: Final = 0.01
_ITEM_BYTES: Final = 64
"""Estimated bytes of an item beside its body."""


class StreamOutbox(Generic[ItemT]):
    """Items that wait to be sent on one stream, in order."""

    def __init__(self, write: Callable[[list[ItemT]], Awaitable[bool]]) -> None:
        """`write` sends one message; it returns False when the stream is over."""
        self._write = write
        self._items: deque[tuple[ItemT, int]] = deque()
        self._bytes = 0
        self._ending = False
        self._patience: asyncio.TimerHandle | None = None
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    def put(self, item: ItemT, size: int, *, soon: bool = True) -> None:
        """Add an item with a body of `size` bytes. The item is sent in the next round of the event loop.

        Without `soon` the item waits up to `PATIENCE_S` seconds for another one to travel with.
        """
        self._items.append((item, size + _ITEM_BYTES))
        self._bytes += size + _ITEM_BYTES
        if soon:
            self._filled.set()
        elif self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._filled.set)
        if self._bytes > WAITING_BYTES:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait while more than `WAITING_BYTES` wait to be sent."""
        if not self._has_room.is_set():
            await self._has_room.wait()

    async def run(self) -> None:
        """Send items until the stream is over, or until `end` and the message that is being sent by then."""
        alive = True
        while alive:
            await self._filled.wait()
            items = self._take()
            alive = not self._ending and (not items or await self._write(items))
        self._has_room.set()

    def end(self) -> None:
        """Send nothing more."""
        self._ending = True
        self._filled.set()

    def _take(self) -> list[ItemT]:
        """The items of the next message."""
        taken = list[ItemT]()
        size = 0
        while self._items and (not taken or size + self._items[0][1] <= MESSAGE_BYTES):
            item, bytes_of_item = self._items.popleft()
            taken.append(item)
            size += bytes_of_item
        self._bytes -= size
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not self._items:
            self._filled.clear()
        if self._bytes <= WAITING_BYTES:
            self._has_room.set()
        return taken
