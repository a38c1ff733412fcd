"""The socket between the leader and a worker. Both ends tell, and both ask."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final

from hackkv.errors import Unavailable
from router.packets import pack, read_packet
from transport.closing import reap

log = logging.getLogger(__name__)

MAX_MESSAGE: Final = 64 << 20
"""Bytes. The largest honest message is the list of all sequences on their way."""
MAX_UNREAD: Final = 16 << 20
"""The most bytes that wait for an end that does not read. With more, that end counts as dead."""

_GONE: Final = "another process of the router has ended"

Hear = Callable[[str, Any, bytes], Awaitable[None]]
"""Takes what the other end tells, by its subject."""
Answer = Callable[[str, Any], Awaitable[Any]]
"""Answers what the other end asks, by its subject."""


class WorkerLink:
    """One end of the socket. Messages are heard in the order of sending. Made by `over`; `close` ends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._closed = False

    @classmethod
    async def over(cls, end: socket.socket) -> WorkerLink:
        """A link over one end of a socket pair, which it closes in the end."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    def tell(self, subject: str, value: Any = None, data: bytes = b"") -> None:
        """Send something that can be written as JSON. If the other end is gone, nothing happens."""
        self._send({"tell": subject, "value": value}, data)

    async def ask(self, subject: str, value: Any, within_s: float) -> Any:
        """The other end's answer. Raises `Unavailable` if there is none in time, or the other end is gone."""
        if self._closed:
            raise Unavailable(_GONE)
        number = next(self._numbers)
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send({"ask": number, "subject": subject, "value": value})
        try:
            async with asyncio.timeout(within_s):
                return await question
        except TimeoutError as error:
            raise Unavailable(f"another process of the router does not answer ({subject})") from error
        finally:
            del self._questions[number]

    async def run(self, hear: Hear, answer: Answer) -> None:
        """Take what the other end says until it is gone. Open questions fail then."""
        tasks = set[asyncio.Task[None]]()
        try:
            while True:
                head, data = await read_packet(self._reader, MAX_MESSAGE)
                if "tell" in head:
                    await hear(head["tell"], head["value"], data)
                elif "ask" in head:
                    task = asyncio.create_task(self._answer(head, answer))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                elif (question := self._questions.get(head["answer"])) and not question.done():
                    question.set_result(head["value"])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it is gone
        finally:
            self.close()
            if tasks:
                await reap(*tasks)

    def close(self) -> None:
        """Hang up; more calls do nothing."""
        self._closed = True
        self._writer.transport.abort()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(Unavailable(_GONE))

    async def _answer(self, head: dict[str, Any], answer: Answer) -> None:
        self._send({"answer": head["ask"], "value": await answer(head["subject"], head["value"])})

    def _send(self, head: dict[str, Any], data: bytes = b"") -> None:
        if self._closed:
            return
        self._writer.write(pack(head, data) + data)
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            log.error("another process of the router does not read what it is told")
            self.close()
