"""The answers of a call that streams them.

A task that is cancelled while it awaits grpc.aio's `read` leaks a message that arrives in that moment. So the memory of
a router whose clients leave would grow (`python -m bench.soak endurance`). Here a task that is never cancelled reads.
Leaving cancels the call, and the end of the call ends the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from hackkv.errors import HackkvError
from transport.status import translating

Call = grpc.aio.UnaryStreamCall[Any, Any]


async def replies(call: Call, address: str) -> AsyncIterator[bytes]:
    """The messages of `call` to `address`, read one ahead. Raises the peer's error, or `NodeLost`.

    Leaving the generator in any way cancels the call at the peer.
    """
    arrived: asyncio.Queue[bytes | HackkvError | None] = asyncio.Queue(maxsize=1)
    left = asyncio.Event()
    reader = asyncio.create_task(_read(call, address, arrived, left))
    try:
        while (message := await arrived.get()) is not None:
            if isinstance(message, HackkvError):
                raise message
            yield message
    finally:
        left.set()
        call.cancel()
        if arrived.full():
            arrived.get_nowait()  # the reader may wait for room
        await asyncio.wait([reader])


async def _read(
    call: Call, address: str, arrived: asyncio.Queue[bytes | HackkvError | None], left: asyncio.Event
) -> None:
    outcome: HackkvError | None = None
    try:
        while not left.is_set():
            with translating(address):
                message = await call.read()
            if not isinstance(message, bytes):  # grpc.aio.EOF
                break
            await arrived.put(message)
    except HackkvError as error:
        outcome = error
    if not left.is_set():
        await arrived.put(outcome)
