"""Server-sent events: one or some for each token.

The headers wait for the first event, so a request that fails before it has a proper status. After that an error is
one event, and the stream ends without `Renderer.end`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from hackkv.errors import Cancelled
from router.api.choices import ChoiceCollector, Delta
from router.api.connection import WRITE
from router.api.errors import envelope
from router.api.generation import Generation
from router.api.reply import Renderer, Reply, log_break, to_json

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the events
]
_TEXT: Final = "<text>"
"""Stands for a text that is not known yet. Nothing that follows the text in an event looks like it."""


class StreamReply(Reply):
    """Sends deltas as they come."""

    def __init__(self, generation: Generation, renderer: Renderer) -> None:
        super().__init__(generation, renderer)
        self._deltas: deque[Delta] = deque()
        self._unsent = b""
        """Events of a delta that are not sent yet. They are kept, since renderers see each delta once."""
        self._news = asyncio.Event()
        self._produced = self._sending = False
        self._write: Callable[[bytes], bool] | None = None
        """See `router.api.connection.WRITE`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Reply`."""
        self._write = scope.get("extensions", {}).get(WRITE)
        await super().__call__(scope, receive, send)

    async def _work(self, tasks: asyncio.TaskGroup, send: Send) -> None:
        tasks.create_task(self._produce())
        while not self._produced or self._deltas or self._unsent:
            await self._news.wait()
            self._news.clear()
            await self._send_deltas(send)

    async def _finish(self, send: Send) -> None:
        events = await self._framed(self._generation.choices, self._renderer.closing(self._generation))
        await self._send_body(send, events + self._renderer.end)
        await send({"type": "http.response.body", "body": b""})

    async def _break_off(self, error: Exception, send: Send) -> None:
        if isinstance(error, Cancelled):
            return
        await self._send_deltas(send)
        log_break(self._generation, error)
        await self._send_body(send, await self._framed(self._generation.choices, [self._renderer.broken(error)]))
        await send({"type": "http.response.body", "body": b""})

    async def _produce(self) -> None:
        await self._generation.run(self._take)
        self._produced = True
        self._news.set()

    def _take(self, delta: Delta) -> None:
        """Write a delta now, or leave it to the task that sends. Writing now saves that task a turn per token."""
        waits = not self._started or self._sending or self._unsent or self._deltas
        if self._write is None or waits or _is_long(delta):
            self._deltas.append(delta)
        elif (events := self._renderer.written(delta)) and not self._write(events):
            self._unsent = events
        else:
            return
        self._news.set()

    async def _send_deltas(self, send: Send) -> None:
        self._sending = True
        while self._deltas or self._unsent:
            if not self._unsent:
                self._unsent = await self._event(self._deltas.popleft())
            if self._unsent:
                await self._send_body(send, self._unsent)
                self._unsent = b""  # only now: a failure elsewhere may have cancelled the sending
        self._sending = False

    async def _event(self, delta: Delta) -> bytes:
        if not _is_long(delta):
            return self._renderer.written(delta)
        return await self._framed((delta.choice,), self._renderer.chunks(delta))

    async def _framed(self, choices: Sequence[ChoiceCollector], events: Iterable[dict[str, Any]]) -> bytes:
        written = b""
        for event in events:
            before, after = self._renderer.frame(event)
            written += before + await self._encoded(choices, event) + after
        return written

    async def _send_body(self, send: Send, data: bytes) -> None:
        if not self._started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._started = True
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _is_long(delta: Delta) -> bool:
    """Whether the events of `delta` may tell of all tokens of the prompt or of the answer."""
    return delta.opening or delta.finish is not None


class Events(ABC):
    """Events of one stream."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events that one delta becomes."""

    @abstractmethod
    def frame(self, event: dict[str, Any]) -> tuple[bytes, bytes]:
        """See `Renderer`."""

    def written(self, delta: Delta) -> bytes:
        """See `Renderer`."""
        written = b""
        for event in self.chunks(delta):
            before, after = self.frame(event)
            written += before + to_json(event) + after
        return written


class OpenAiEvents(Events):
    """Events of OpenAI's older routes: data alone, and at last `[DONE]`."""

    end = b"data: [DONE]\n\n"

    def __init__(self, *, plain: bool) -> None:
        """If the events are `plain`, those in the middle of a choice differ in their text only."""
        self._plain = plain
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text of a choice's plain event."""

    def frame(self, event: dict[str, Any]) -> tuple[bytes, bytes]:
        """See `Renderer`."""
        return b"data: ", b"\n\n"

    def written(self, delta: Delta) -> bytes:
        """See `Renderer`. Only the text of a plain event is encoded; the bytes around it are kept."""
        index = delta.choice.index
        if not self._plain or _is_long(delta):
            return super().written(delta)
        if index not in self._around:
            before, _, after = super().written(replace(delta, text=_TEXT)).rpartition(to_json(_TEXT))
            self._around[index] = before, after
        before, after = self._around[index]
        return before + to_json(delta.text) + after

    def broken(self, error: Exception) -> dict[str, Any]:
        """OpenAI's envelope."""
        return envelope(error)


class NamedEvents(Events):
    """Events of newer APIs: each has a name, which is its `type` too. The last one ends the stream."""

    end = b""

    def frame(self, event: dict[str, Any]) -> tuple[bytes, bytes]:
        """See `Renderer`."""
        return b"event: " + str(event["type"]).encode("ascii") + b"\ndata: ", b"\n\n"
