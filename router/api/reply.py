"""Responses that generate while they are sent, and stop when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any, Final, Protocol

import pydantic_core
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hackkv.errors import Cancelled, HackkvError
from router.api.caller import Caller
from router.api.choices import ChoiceCollector, Delta
from router.api.generation import Generation
from router.api.schema import Generate
from router.scopes import unwrapped
from transport.slices import give_way

log = logging.getLogger(__name__)


SMALL: Final = 256
"""Tokens up to which an answer, or an event, is written at once: with log-probabilities it takes some milliseconds."""
PIECE: Final = 16
"""Rows that are encoded at once."""
SENT_AT_ONCE: Final = 256 << 10
"""Bytes of an answer that are handed to the socket together."""
SLICE_S, OTHERS_S = 0.002, 0.008
"""Seconds for which a larger answer is written before other tasks run, and the most seconds for which those run then.
So one large answer takes a fifth of a busy event loop, and all of an idle one."""


class TokenRows:
    """Rows of an answer, one for each of its tokens. They are made while they are written: there may be very many."""

    def __init__(self, rows: Iterable[Any]) -> None:
        """`rows` can be read once."""
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def listed(self) -> list[Any]:
        """All rows, which can be read again from now on."""
        self._rows = rows = list(self._rows)
        return rows


def rows_of(rows: Iterable[Any], count: int) -> TokenRows | list[Any]:
    """Rows of `count` tokens. One row, which an event of a stream has, is made at once: a list is written faster."""
    return list(rows) if count == 1 else TokenRows(rows)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, TokenRows):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return value.listed()


def to_json(value: object) -> bytes:
    """Compact UTF-8. Numbers that JSON lacks are null, and halves of characters are question marks."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null", fallback=_listed)
    except pydantic_core.PydanticSerializationError:  # it refuses halves of characters (lone surrogates)
        whole = json.dumps(value, ensure_ascii=False, default=_listed).encode("utf-8", "replace")
        return pydantic_core.to_json(json.loads(whole))


async def to_json_in_slices(value: dict[str, Any]) -> bytes:
    """The bytes of `to_json`, written in slices of time, between which others run.

    A thread would not help: each time that the event loop sends something, the loop would have to win the interpreter's
    lock back from the thread.
    """
    pieces, until = [], perf_counter() + SLICE_S
    for piece in _pieces(value):
        pieces.append(piece)
        if perf_counter() >= until:
            await give_way(OTHERS_S)
            until = perf_counter() + SLICE_S
    return b"".join(pieces)


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        for nth, (key, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if nth else b"{", to_json(key))
            yield from _pieces(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        for nth, item in enumerate(value):
            yield b"," if nth else b"["
            yield from _pieces(item)
        yield b"]" if value else b"[]"
    elif isinstance(value, TokenRows):
        begun, rows = False, iter(value)
        while some := list(islice(rows, PIECE)):
            yield (b"," if begun else b"[") + to_json(some)[1:-1]
            begun = True
        yield b"]" if begun else b"[]"
    else:
        yield to_json(value)


class Renderer(Protocol):
    """Writes the answers of an endpoint."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events that one delta becomes."""
        ...

    def written(self, delta: Delta) -> bytes:
        """The events of `chunks`, as a stream has them."""
        ...

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """The events after the last delta."""
        ...

    def broken(self, error: Exception) -> dict[str, Any]:
        """The event with which a stream breaks off."""
        ...

    def frame(self, event: dict[str, Any]) -> tuple[bytes, bytes]:
        """The bytes of a stream before and after an event."""
        ...

    @property
    def end(self) -> bytes:
        """The bytes that end a stream which is complete."""
        ...


def running_usage(body: Generate, delta: Delta) -> dict[str, Any] | None:
    """The `usage` of an event in a stream: null as with OpenAI, or as with vLLM the counts so far, if asked for."""
    return delta.usage() if body.continuous_usage else None


class Reply(Response):
    """Runs a generation for as long as the client stays."""

    def __init__(self, generation: Generation, renderer: Renderer) -> None:
        super().__init__()
        self._generation, self._renderer = generation, renderer
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Errors before the first byte are raised, for the exception handlers."""
        error: BaseException | None = None
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as tasks:
                    watcher = tasks.create_task(self._watch(receive))
                    await self._work(tasks, send)
                    watcher.cancel()  # before the last byte, since every client may leave after it
                    await asyncio.wait([watcher])
            await self._finish(send)
        except BaseException as caught:
            error = caught
            if not self._started or not isinstance(caught, Exception):
                raise
            await self._break_off(caught, send)
        finally:
            await self._generation.settle(error)
            if isinstance(error, Cancelled):  # nobody reads its traceback, which would keep this request in a cycle
                error.__traceback__ = error.__context__ = None

    @abstractmethod
    async def _work(self, tasks: asyncio.TaskGroup, send: Send) -> None:
        """Generate; may send."""

    @abstractmethod
    async def _finish(self, send: Send) -> None:
        """Send what remains."""

    async def _break_off(self, error: Exception, send: Send) -> None:
        """Report an error after the status has been sent, when only the body can carry it."""
        raise error

    async def _encoded(self, choices: Iterable[ChoiceCollector], value: dict[str, Any]) -> bytes:
        """JSON that tells of these choices. Only one large answer is encoded at a time."""
        if sum(choice.size for choice in choices) <= SMALL:
            return to_json(value)
        async with self._generation.writing:
            return await to_json_in_slices(value)

    async def _watch(self, receive: Receive) -> None:
        """Raise `Cancelled` when the client leaves. The request's clock stops there, so cleaning up is not counted."""
        await Caller(receive).left()
        for choice in self._generation.choices:
            if choice.flight is not None:
                choice.flight.clock.stop()
        raise Cancelled("the client left")


class JsonReply(Reply):
    """One JSON object, sent when everything is generated."""

    async def _work(self, tasks: asyncio.TaskGroup, send: Send) -> None:
        await self._generation.run()

    async def _finish(self, send: Send) -> None:
        body = memoryview(await self._encoded(self._generation.choices, self._renderer.whole(self._generation)))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # In pieces, each when the client has taken those before: sockets copy what waits, and many MiB take long.
        last = max(0, len(body) - 1) // SENT_AT_ONCE * SENT_AT_ONCE
        for start in range(0, last, SENT_AT_ONCE):
            piece = bytes(body[start : start + SENT_AT_ONCE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": bytes(body[last:])})


def log_break(generation: Generation, error: Exception) -> None:
    """Log an error that broke an answer off, if it is a fault of ours."""
    if not isinstance(error, HackkvError):
        log.error("request %s broke off", generation.request_id, exc_info=error)
