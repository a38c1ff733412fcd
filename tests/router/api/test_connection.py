"""Connections over real sockets: slow heads, half-closed clients, bodies that are refused midway."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator

import h11
import pytest
from anthropic.types.shared import ErrorResponse

from hackkv.tokenizer import Tokenizer
from router.api.connection import FREE_CHUNKS, Waits
from tests.router.api.sockets import BODY, REQUEST, finish, head, ids, listening
from tests.router.conftest import TwoWorkers, outside
from tests.router.processes import joined
from tests.router.runs import until
from tests.router.scripted import Cluster, Point


@pytest.fixture(name="port", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["inside", "workers"])
async def open_port(
    request: pytest.FixtureRequest, cluster: Cluster, tokenizer: Tokenizer, two_workers: TwoWorkers
) -> AsyncIterator[int]:
    """The port of the HTTP API, in this process or in two others. In the end nothing is left on the nodes."""
    if request.param == 1:
        async with listening(cluster, tokenizer) as (port, _):
            yield port
        cluster.assert_idle()
    else:
        address = two_workers({"proxies": []})
        async with joined(cluster, address["control"]), outside(cluster, tokenizer, "none", address["http"]) as api:
            yield api.http.base_url.port or 0
            await api.assert_idle()


STREAMED = json.dumps({"prompt": "x", "max_tokens": 4, "stream": True}).encode()


@pytest.mark.parametrize("begun", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_is_a_408(cluster: Cluster, tokenizer: Tokenizer, begun: bytes) -> None:
    async with listening(cluster, tokenizer, waits=Waits(0.05, 600)) as (port, refused):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        answer = await finish(reader, writer)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert set(ids(answer)) == {"x-request-id", "request-id"}
        assert refused == [408]


async def test_a_second_head_has_a_deadline_too(cluster: Cluster, tokenizer: Tokenizer) -> None:
    async with listening(cluster, tokenizer, waits=Waits(0.5, 600)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /live HT")
        assert b"HTTP/1.1 408 " in await finish(reader, writer)


async def test_a_half_closed_client_gets_its_answer(cluster: Cluster, port: int) -> None:
    gate = cluster.gate(Point.TOKEN)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    writer.write_eof()
    await reader.readuntil(b"HTTP/1.1 100 \r\n\r\n")  # the probe: the server suspects that the client has left
    gate.set()
    answer = await finish(reader, writer)
    assert b"HTTP/1.1 200 OK" in answer
    assert b'"completion_tokens":3' in answer


@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_left_frees_the_nodes(cluster: Cluster, port: int, version: str, body: bytes) -> None:
    cluster.gate(Point.TOKEN)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(len(body), version=version) + body)
    await cluster.script.reached[Point.TOKEN].wait()
    if body is STREAMED:
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: not cluster.open)


async def test_a_stream_is_chunked_as_http_has_it(port: int) -> None:
    """h11 can read a stream that the server writes without h11, and the connection goes on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    texts = []
    for _ in range(2):
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        client.send(h11.EndOfMessage())
        writer.write(head(len(STREAMED)) + STREAMED)
        body = b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Data):
                body += event.data
        *events, end, rest = body.split(b"\n\n")
        assert (end, rest) == (b"data: [DONE]", b"")
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        texts.append("".join(choice["text"] for choice in choices))
    assert len(texts[0]) == 4
    writer.close()


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_request_leaves_the_garbage_collector_nothing(
    cluster: Cluster, tokenizer: Tokenizer, body: bytes, leaves: bool
) -> None:
    """No object of ours needs the collector, also if the client leaves. Transports of asyncio are part of a cycle."""

    async def ask() -> None:
        cluster.script.reached[Point.TOKEN].clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(len(body), "connection: close") + body)
        if leaves:
            await cluster.script.reached[Point.TOKEN].wait()
            writer.close()
        else:
            assert (await finish(reader, writer)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: not any("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks()))

    if leaves:
        cluster.gate(Point.TOKEN)
    async with listening(cluster, tokenizer) as (port, _):
        await ask()
        gc.collect()
        gc.disable()
        try:
            await ask()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not [name for name in left if name.startswith(("router.", "hackkv.", "uvicorn.", "_asyncio.Task"))]


async def test_a_client_can_read_why_its_body_was_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(1 << 23))
    for _ in range(1 << 7):
        writer.write(b" " * (1 << 16))
        await writer.drain()
    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await finish(reader, writer)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"HTTP/1.1 200 OK" in answer  # the body was dropped, and the connection goes on


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
async def test_a_body_in_crumbs_is_refused(cluster: Cluster, tokenizer: Tokenizer, path: bytes) -> None:
    async with listening(cluster, tokenizer) as (port, refused):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\n \r\n" * (FREE_CHUNKS + 1))
        writer.write_eof()
        answer = await finish(reader, writer)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert refused == [400]
        assert ids(answer)["x-request-id"] == "mine"
        if path == b"/v1/messages":
            told = ErrorResponse.model_validate_json(answer.partition(b"\r\n\r\n")[2], extra="forbid")
            assert (told.error.type, told.request_id) == ("invalid_request_error", "mine")
        else:
            assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}


async def test_what_is_not_http_is_a_400_in_our_envelope(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01\r\n\r\n")
    writer.write_eof()
    answer = await finish(reader, writer)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert ids(answer)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (b"GET /live HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n", 431, "longer than 65536 bytes"),
        (b"GET /live HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", 400, "bad Content-Length"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: zip\r\n\r\n", 501, "Transfer-Encoding"),
        (b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"\xff" * 3000 + b": 1\r\n\r\n", 400, "illegal header"),
    ],
    ids=["long", "length", "host", "coding", "name"],
)
async def test_headers_that_cannot_be_taken_are_told_why(port: int, head: bytes, status: int, reason: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    writer.write_eof()
    answer = await finish(reader, writer)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert reason in message
    assert len(message) <= 200


async def test_a_client_that_takes_nothing_is_given_up(cluster: Cluster, tokenizer: Tokenizer) -> None:
    async with listening(cluster, tokenizer, waits=Waits(600, 0.05)) as (port, _):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            with pytest.raises(ConnectionError):
                await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * (1 << 20))
