"""Many calls on one stream of gRPC: the node's side (`transport.trunk` is the caller's)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from hackkv.errors import HackkvError, NodeLost, Overloaded, TransferError
from transport.closing import closing, reap
from transport.coder import MessageCoder
from transport.convert_calls import ANSWERS, ASKS, Answer, Ask
from transport.outbox import StreamOutbox
from transport.status import Context, answer, internal, read_message
from transport.trail import TRAIL, incoming

JobT = TypeVar("JobT")
EventT = TypeVar("EventT")

MOST_CALLS: Final = 1 << 16
"""The most calls under way on one stream."""
LAST_MESSAGE_S: Final = 1.0
"""Seconds for a message that is being sent when the stream ends."""


@dataclass(frozen=True, slots=True)
class Method(Generic[JobT, EventT]):
    """A method whose calls share a stream."""

    path: str
    jobs: MessageCoder[JobT, Any]
    events: MessageCoder[Any, Any]
    serve: Callable[[JobT], AsyncIterator[EventT]]
    parts: Callable[[EventT], Iterable[Any]] = lambda event: (event,)
    """The parts that are sent for an event, in order. `events` encodes each."""


class Calls(Generic[JobT, EventT]):
    """The calls on one stream."""

    def __init__(self, method: Method[JobT, EventT], context: Context) -> None:
        self._method, self._context = method, context
        self._answers = StreamOutbox[Answer](self._send)
        self._under_way: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until the caller ends the stream. On return every call is over and its generator closed.

        Raises `TransferError` if the caller breaks the protocol.
        """
        sending = asyncio.create_task(self._answers.run())
        try:
            with contextlib.suppress(NodeLost):  # the caller has gone
                while True:
                    for ask in ASKS.decode(await read_message(self._context)):
                        self._take(ask)
        finally:
            if self._under_way:
                await reap(*self._under_way.values())
            # gRPC cannot end a stream in the middle of a message. So that message gets time, and is lost if the caller
            # does not read it within `LAST_MESSAGE_S`.
            self._answers.end()
            await asyncio.wait([sending], timeout=LAST_MESSAGE_S)
            await reap(sending)

    async def _send(self, answers: list[Answer]) -> bool:
        try:
            await answer(self._context, ANSWERS.encode(answers))
        except NodeLost:
            return False
        return True

    def _take(self, ask: Ask) -> None:
        task = self._under_way.get(ask.call)
        if ask.job is None:
            if task is not None:  # else the call has ended meanwhile
                task.cancel()
        elif task is not None:
            raise TransferError(f"call {ask.call} has begun before")
        elif len(self._under_way) >= MOST_CALLS:
            self._put(ask.call, Overloaded(f"{MOST_CALLS} calls are under way"))
        else:
            task = self._under_way[ask.call] = asyncio.create_task(self._serve(ask, ask.job))
            task.add_done_callback(lambda _: self._under_way.pop(ask.call))

    async def _serve(self, ask: Ask, job: bytes) -> None:
        TRAIL.set(incoming(ask.trail.items()))  # the task has a context of its own
        verdict: HackkvError | None = None
        try:
            await self._answer(ask.call, job)
        except HackkvError as error:
            verdict = error
        except Exception as error:  # noqa: BLE001 - logged there, and reported to the caller as `internal`
            verdict = internal(error, self._method.path)
        self._put(ask.call, verdict)

    async def _answer(self, number: int, job: bytes) -> None:
        method = self._method
        async with closing(method.serve(method.jobs.decode(job))) as events:
            async for event in events:
                for part in method.parts(event):
                    self._put(number, method.events.encode(part))
                    await self._answers.room()

    def _put(self, number: int, body: bytes | HackkvError | None) -> None:
        self._answers.put(Answer(number, body), len(body) if isinstance(body, bytes) else 0)
