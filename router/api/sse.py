"""Server-sent events: one or some for each token.

The headers wait for the first event, so a request that fails before it has a proper status. After that an error is
one event, and the stream ends without what ends it in good order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from starlette.types import Send

from hackkv.errors import Cancelled
from router.api.choices import Delta
from router.api.errors import envelope
from router.api.generation import Generation
from router.api.reply import Renderer, Reply, log_break, to_json

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the events
]


class StreamReply(Reply):
    """Sends deltas as they come."""

    def __init__(self, generation: Generation, renderer: Renderer) -> None:
        super().__init__(generation, renderer)
        self._deltas: deque[Delta] = deque()
        self._unsent = b""
        """Events that a delta became; renderers see each delta once."""
        self._news = asyncio.Event()
        self._produced = False

    async def _work(self, tasks: asyncio.TaskGroup, send: Send) -> None:
        tasks.create_task(self._produce())
        while not self._produced or self._deltas:
            await self._news.wait()
            self._news.clear()
            await self._send_deltas(send)

    async def _finish(self, send: Send) -> None:
        events = self._renderer.closing(self._generation)
        await self._send_body(send, b"".join(map(self._renderer.framed, events)) + self._renderer.end)
        await send({"type": "http.response.body", "body": b""})

    async def _break_off(self, error: Exception, send: Send) -> None:
        if isinstance(error, Cancelled):
            return
        await self._send_deltas(send)
        log_break(self._generation, error)
        await self._send_body(send, self._renderer.framed(self._renderer.broken(error)))
        await send({"type": "http.response.body", "body": b""})

    async def _produce(self) -> None:
        await self._generation.run(self._take)
        self._produced = True
        self._news.set()

    def _take(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    async def _send_deltas(self, send: Send) -> None:
        while self._deltas or self._unsent:
            if not self._unsent:
                events = self._renderer.chunks(self._deltas.popleft())
                self._unsent = b"".join(map(self._renderer.framed, events))
            if self._unsent:
                await self._send_body(send, self._unsent)
                self._unsent = b""  # only now: a failure elsewhere may have cancelled the sending

    async def _send_body(self, send: Send, data: bytes) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._started = True
        await send({"type": "http.response.body", "body": data, "more_body": True})


class OpenAiEvents:
    """How OpenAI's older routes write events: as data alone, and at last `[DONE]`."""

    end = b"data: [DONE]\n\n"

    def framed(self, event: dict[str, Any]) -> bytes:
        """See `Renderer`."""
        return b"data: " + to_json(event) + b"\n\n"

    def broken(self, error: Exception) -> dict[str, Any]:
        """OpenAI's envelope."""
        return envelope(error)


class NamedEvents:
    """How newer APIs write events: each with its name, which is its `type` too. The last one ends the stream."""

    end = b""

    def framed(self, event: dict[str, Any]) -> bytes:
        """See `Renderer`."""
        return b"event: " + str(event["type"]).encode("ascii") + b"\ndata: " + to_json(event) + b"\n\n"
