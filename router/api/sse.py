"""Server-sent events: one event for each token, then `data: [DONE]`.

The headers wait for the first event, so a request that fails before it has a proper status. After that an error is
one event with OpenAI's envelope, and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Send

from hackkv.errors import Cancelled
from router.api.choices import Delta
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
        self._news = asyncio.Event()
        self._produced = False

    async def _work(self, tasks: asyncio.TaskGroup, send: Send) -> None:
        tasks.create_task(self._produce())
        while not self._produced or self._deltas:
            await self._news.wait()
            self._news.clear()
            await self._send_deltas(send)

    async def _finish(self, send: Send) -> None:
        closing = self._renderer.closing_chunk(self._generation)
        data = b"" if closing is None else _event(to_json(closing))
        await self._send_body(send, data + _event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b""})

    async def _break_off(self, error: Exception, send: Send) -> None:
        if isinstance(error, Cancelled):
            return
        await self._send_deltas(send)
        await self._send_body(send, _event(log_break(self._generation, error)))
        await send({"type": "http.response.body", "body": b""})

    async def _produce(self) -> None:
        await self._generation.run(self._take)
        self._produced = True
        self._news.set()

    def _take(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    async def _send_deltas(self, send: Send) -> None:
        while self._deltas:
            chunks = self._renderer.chunks(self._deltas[0])
            await self._send_body(send, b"".join(_event(to_json(chunk)) for chunk in chunks))
            self._deltas.popleft()  # only now: a failure elsewhere may have cancelled the sending

    async def _send_body(self, send: Send, data: bytes) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._started = True
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
