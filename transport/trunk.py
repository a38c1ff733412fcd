"""Many calls on one stream of gRPC: the caller's side.

Each call of gRPC costs much processor time, and so does each message, however small. So all calls of one method to one
node share a stream, a *trunk*, and items that come together travel in one message.

A task that is cancelled while it awaits grpc.aio's `read` leaks a message that arrives in that moment. So the memory of
a router whose clients leave would grow (`python -m bench.soak endurance`). Here a task that is never cancelled reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from copy import copy
from itertools import count
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import grpc.aio

from hackkv.errors import HackkvError, NodeLost
from transport.coder import MessageCoder
from transport.convert_calls import ANSWERS, ASKS, Ask
from transport.outbox import StreamOutbox
from transport.status import translating, write_message
from transport.trail import outgoing

Stream = grpc.aio.StreamStreamCall[bytes, bytes]
Body = bytes | HackkvError | None
"""An event of a call, the error with which it failed, or None: its end."""
SLICE_S: Final = 0.002
"""Seconds for which answers are handed out before other tasks run."""
JobT = TypeVar("JobT")
EventT = TypeVar("EventT")


class Trunk:
    """The calls of one method to one node, while its stream lasts."""

    def __init__(self, stream: Stream, address: str) -> None:
        self._stream, self._address = stream, address
        self._takers: dict[int, Callable[[Body], None]] = {}
        self._numbers = count(1)
        self._asks = StreamOutbox[Ask](lambda asks: write_message(stream, ASKS.encode(asks)))
        self.lost = False
        """The stream is over. No call can begin."""
        self._writer = asyncio.create_task(self._asks.run())
        self._reader = asyncio.create_task(self._read())

    def begin(self, job: bytes, take: Callable[[Body], None]) -> int:
        """Begin a call; `take` gets its answers in order. Returns the call's number."""
        number = next(self._numbers)
        self._takers[number] = take
        self._asks.put(Ask(number, job, dict(outgoing())), len(job))
        return number

    def leave(self, number: int) -> None:
        """End a call at the node, unless it is over."""
        if self._takers.pop(number, None) is not None:
            self._asks.put(Ask(number), 0, soon=False)

    async def close(self) -> None:
        """End the stream; calls under way fail with `NodeLost`."""
        self._stream.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        """Hand answers out until the stream is over, then give every call the error that ended it."""
        error: HackkvError = NodeLost(f"{self._address}: the connection was closed")
        try:
            with translating(self._address):
                while isinstance(data := await self._stream.read(), bytes):
                    await self._hand_out(data)
        except HackkvError as caught:
            error = caught
        finally:
            self.lost = True
            self._stream.cancel()
            self._writer.cancel()
        for take in self._takers.values():
            take(copy(error))
        self._takers.clear()

    async def _hand_out(self, data: bytes) -> None:
        """Hand out the answers of a message in slices of time: the callers' work on all of them may take long."""
        until = perf_counter() + SLICE_S
        for answer in ANSWERS.decode(data):
            if perf_counter() >= until:
                await asyncio.sleep(0)
                until = perf_counter() + SLICE_S
            take = self._takers.get(answer.call)
            if take is None:  # its caller has left
                continue
            if not isinstance(answer.body, bytes):
                del self._takers[answer.call]
            take(answer.body)


class TrunkCall(Generic[JobT, EventT]):
    """One call: an iterator over its events. The first `__anext__` begins the call; `aclose` ends it.

    Raises the node's errors, or `NodeLost`.
    """

    def __init__(
        self,
        trunk: Callable[[], Awaitable[Trunk]],
        job: JobT,
        jobs: MessageCoder[JobT, Any],
        events: MessageCoder[EventT, Any],
    ) -> None:
        """`trunk` returns the stream, and opens it if necessary."""
        self._open, self._job, self._jobs, self._events = trunk, job, jobs, events
        self._trunk: Trunk | None = None
        self._number = 0
        self._arrived: deque[Body] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._over = False

    def __aiter__(self) -> TrunkCall[JobT, EventT]:
        return self

    async def __anext__(self) -> EventT:
        """The next event. As with a generator, any error ends the call."""
        if self._over:
            raise StopAsyncIteration
        try:
            body = await self._next()
            if isinstance(body, bytes):
                return self._events.decode(body)
        except BaseException:
            await self.aclose()
            raise
        self._over = True
        if body is None:
            raise StopAsyncIteration
        raise body

    async def aclose(self) -> None:
        """End the call at the node. Closing twice is fine."""
        self._over = True
        self._arrived.clear()
        if self._trunk is not None:
            self._trunk.leave(self._number)

    async def _begin(self) -> None:
        """Begin the call, unless it has begun."""
        if self._trunk is None:
            job = self._jobs.encode(self._job)
            self._trunk = await self._open()
            self._number = self._trunk.begin(job, self._take)

    async def _next(self) -> Body:
        await self._begin()
        while not self._arrived:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._arrived.popleft()

    def _take(self, body: Body) -> None:
        self._arrived.append(body)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
