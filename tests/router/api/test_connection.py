"""Connections over real sockets: slow heads, too many of them, half-closed clients, bodies that are refused midway."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_network

import h11
import pytest
from anthropic.types.shared import ErrorResponse

from hackkv.tokenizer import Tokenizer
from router.api.app import build_app
from router.api.connection import FREE_CHUNKS, BoundedHttp, Census, Network, Waits
from router.api.served import ServedModel
from router.front import make_server
from tests.router.conftest import LIMITS, TwoWorkers, make_served, outside
from tests.router.processes import joined
from tests.router.runs import until
from tests.router.scripted import Cluster, Point

DUAL = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
PATIENT = Waits(600.0, 600.0, 600.0)


@asynccontextmanager
async def listening(
    cluster: Cluster,
    tokenizer: Tokenizer,
    census: Census | None = None,
    waits: Waits = PATIENT,
    served: ServedModel | None = None,
    proxies: tuple[Network, ...] = (),
    dual: bool = False,
) -> AsyncIterator[tuple[int, list[int]]]:
    """The HTTP API on a port, of IPv6 too if `dual`. Yields the port and the statuses of refused connections."""
    census = census or Census(100, 100, ())
    refused: list[int] = []
    app = build_app(served or make_served(cluster, tokenizer), max_body_bytes=1 << 16)
    server = make_server(app, partial(BoundedHttp, census, waits, refused.append), proxies)
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("::" if dual else "127.0.0.1", 0), family=family, dualstack_ipv6=dual)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1], refused
    finally:
        server.should_exit = True
        await serving
    assert census.total == 0


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


def head(length: int, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request up to its body."""
    lines = (f"POST {path} HTTP/{version}", "host: x", "content-type: application/json", *headers)
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
REQUEST = head(len(BODY)) + BODY


STREAMED = json.dumps({"prompt": "x", "max_tokens": 4, "stream": True}).encode()


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


@pytest.mark.parametrize("begun", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_is_a_408(cluster: Cluster, tokenizer: Tokenizer, begun: bytes) -> None:
    async with listening(cluster, tokenizer, waits=Waits(0.05, 600, 600)) as (port, refused):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        answer = await finish(reader, writer)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert set(ids(answer)) == {"x-request-id", "request-id"}
        assert refused == [408]


async def test_a_second_head_has_a_deadline_too(cluster: Cluster, tokenizer: Tokenizer) -> None:
    async with listening(cluster, tokenizer, waits=Waits(0.5, 600, 600)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /live HT")
        assert b"HTTP/1.1 408 " in await finish(reader, writer)


async def test_a_connection_without_a_next_request_is_closed(cluster: Cluster, tokenizer: Tokenizer) -> None:
    async with listening(cluster, tokenizer, waits=Waits(600, 600, 0.05)) as (port, refused):
        answer = await finish(*await asked(port))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer
        assert not refused


@pytest.mark.parametrize("census", [Census(2, 100, ()), Census(100, 2, ())], ids=["all", "of an address"])
async def test_the_connection_that_waits_longest_for_a_request_makes_room(
    cluster: Cluster, tokenizer: Tokenizer, census: Census
) -> None:
    async with listening(cluster, tokenizer, census) as (port, refused):
        first, second = [await asked(port) for _ in range(2)]
        await first[0].readuntil(b"}}}")
        await second[0].readuntil(b"}}}")
        first[1].write(REQUEST)
        await first[0].readuntil(b"}}}")  # so `second` has waited longer
        third = await asked(port)
        await third[0].readuntil(b"}}}")
        assert await finish(*second) == b""
        first[1].write(REQUEST)  # is still there
        assert (await first[0].readuntil(b"}}}")).startswith(b"HTTP/1.1 200 ")
        for one in (first, third):
            one[1].close()
        assert not refused


async def test_connections_are_counted_by_address_but_not_those_of_proxies(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    async with listening(cluster, tokenizer, Census(100, 1, ())) as (port, refused):
        first = await asyncio.open_connection("127.0.0.1", port)
        second = await asyncio.open_connection("127.0.0.1", port)
        answer = await finish(*second)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert ids(answer)
        body = answer.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        # The client has not said which API it speaks. Clients of both can read this error.
        assert ErrorResponse.model_validate_json(body).error.type == "rate_limit_error"
        first[1].write(REQUEST)
        assert (await first[0].readuntil(b"}}}")).startswith(b"HTTP/1.1 200")
        assert refused == [429]
        first[1].close()
    census = Census(3, 1, (ip_network("127.0.0.0/8"), ip_network("::1/128")))
    assert [census.enter(address) for address in ("127.0.0.1", "127.0.0.9", "::ffff:127.0.0.1")] == [None] * 3
    full = census.enter("127.0.0.1")
    assert full is not None
    assert full.status == 503


@pytest.mark.parametrize(("trusted", "dual"), [(True, False), (False, False), pytest.param(True, True, marks=DUAL)])
async def test_only_a_proxy_may_say_whose_turn_it_is(
    cluster: Cluster, tokenizer: Tokenizer, trusted: bool, dual: bool
) -> None:
    """Two clients of one proxy count as two: the bytes that one sends do not count against the other."""
    size = 60_000
    served = make_served(cluster, tokenizer, limits={**LIMITS, "max_buffered_bytes": 3 * size})
    proxies = (ip_network("127.0.0.0/8"),) if trusted else ()

    async def ask(port: int, address: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(size, f"x-forwarded-for: {address}", "connection: close") + BODY.ljust(size))
        return await finish(reader, writer)

    async with listening(cluster, tokenizer, served=served, proxies=proxies, dual=dual) as (port, _):
        _, slow = await asyncio.open_connection("127.0.0.1", port)
        slow.write(head(size + 1, "x-forwarded-for: 192.0.2.1") + b" " * size)
        await until(lambda: served.bodies.held == size)
        assert (await ask(port, "192.0.2.1")).startswith(b"HTTP/1.1 429 ")  # more than half of all bytes
        assert (await ask(port, "192.0.2.2")).startswith(b"HTTP/1.1 200 " if trusted else b"HTTP/1.1 429 ")
        slow.close()
        await until(lambda: not served.bodies.held)
    await served.prompts.parsers.close()


def test_one_ipv6_network_is_one_client() -> None:
    census = Census(100, 1, ())
    assert census.enter("2001:db8::1") is None
    assert census.enter("2001:db8:0:1::1") is None
    assert census.enter("2001:db8::2%eth0") is not None
    for address in ("2001:db8::1", "2001:db8:0:1::1", "2001:db8::2%eth0"):
        census.leave(address)
    assert census.enter("2001:db8::2") is None


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
    async with listening(cluster, tokenizer, waits=Waits(600, 0.05, 600)) as (port, _):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            with pytest.raises(ConnectionError):
                await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * (1 << 20))
