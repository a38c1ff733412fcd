"""HTTP/1.1 by hand over one keep-alive connection, to time the socket itself and to cut a request off anywhere.

A client library would add its own milliseconds to every measurement, and could not stop in the middle of a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Lender = Callable[[], AbstractAsyncContextManager["Connection"]]
"""Lends a connection for one request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises `ValueError` if it is not JSON."""
        return json.loads(self.body)


class Connection:
    """One connection to the router."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._reader, self._writer = host, reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Connection]:
        """Open a connection, which is aborted at the end of the context."""
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        connection = cls(parts.netloc, reader, writer)
        try:
            yield connection
        finally:
            await connection.abort()

    @classmethod
    @contextlib.asynccontextmanager
    async def pooled(cls, url: str) -> AsyncIterator[Lender]:
        """A lender of connections that stay open between requests, as those of client libraries do."""
        free = list[Connection]()
        async with contextlib.AsyncExitStack() as opened:

            @contextlib.asynccontextmanager
            async def lend() -> AsyncIterator[Connection]:
                """One that is free, or a new one. It is not lent again if an error is raised meanwhile."""
                connection = free.pop() if free else await opened.enter_async_context(cls.to(url))
                yield connection
                free.append(connection)

            yield lend

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a whole request."""
        self._writer.write(self.head(method, path, f"Content-Length: {len(body)}") + body)
        await self._writer.drain()

    async def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """The bytes of a request up to and including the blank line."""
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self._host}", "Content-Type: application/json", *headers)
        return "\r\n".join((*lines, "", "")).encode()

    async def begin(self) -> tuple[int, dict[str, str]]:
        """Read the status line and the headers (names in lower case). Raises `ConnectionError` if the peer hung up."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the router hung up before its answer") from error
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(status.split(" ")[1]), headers

    async def parts(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """Read the body as it comes, a chunk at a time. Raises `ConnectionError` if it breaks off."""
        try:
            if headers.get("transfer-encoding") != "chunked":
                yield await self._reader.readexactly(int(headers.get("content-length", "0")))
                return
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the router hung up in the middle of its answer") from error

    async def finish(self) -> Answer:
        """Read one whole response."""
        status, headers = await self.begin()
        return Answer(status, headers, b"".join([part async for part in self.parts(headers)]))

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send one request and read its response."""
        await self.send(method, path, body)
        return await self.finish()

    async def abort(self) -> None:
        """Drop the connection and everything under way on it. Further calls do nothing."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
