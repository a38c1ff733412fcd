"""The HTTP API behind real sockets, and requests to it as bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.connection import BoundedHttp, Census, Network, Waits
from router.api.served import ServedModel
from router.front import make_server
from tests.router.conftest import make_served
from tests.router.scripted import Cluster

PATIENT = Waits(600.0, 600.0)


@asynccontextmanager
async def listening(
    cluster: Cluster,
    tokenizer: Tokenizer,
    census: Census | None = None,
    waits: Waits = PATIENT,
    served: ServedModel | None = None,
    proxies: tuple[Network, ...] = (),
    dual: bool = False,
    idle_s: float = 600.0,
) -> AsyncIterator[tuple[int, list[int]]]:
    """The HTTP API on a port, of IPv6 too if `dual`. Yields the port and the statuses of refused connections."""
    census = census or Census(100, 100, ())
    refused: list[int] = []
    app = build_app(served or make_served(cluster, tokenizer), max_body_bytes=1 << 16)
    server = make_server(app, partial(BoundedHttp, census, waits, refused.append), proxies, idle_s)
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("::" if dual else "127.0.0.1", 0), family=family, dualstack_ipv6=dual)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1], refused
    finally:
        server.should_exit = True
        await serving
    assert census.total == 0


def head(length: int, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request up to its body."""
    lines = (f"POST {path} HTTP/{version}", "host: x", "content-type: application/json", *headers)
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
REQUEST = head(len(BODY)) + BODY


def ids(answer: bytes) -> dict[str, str]:
    """The headers of an answer that carry the request's id. All have the same value."""
    lines = [line.split(": ", 1) for line in answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]]
    found = {name: value for name, value in lines if name in ("x-request-id", "request-id")}
    assert len(set(found.values())) == 1
    return found


async def asked(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent its first request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    return reader, writer


async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that the peer still sends."""
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return data
