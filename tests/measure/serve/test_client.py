"""One request over a real socket to a server that answers, breaks off or sends nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hackkv.errors import ConfigError
from measure.serve.calls import PlannedRequest
from measure.serve.client import Api, Client, RequestOutcome

CALL = PlannedRequest(0.0, "def f():", 4, 3)
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}
REPORT = {"choices": [], "hackkv": {"total_s": 1.0}}


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def stream(*events: dict[str, Any], done: bool = True) -> bytes:
    lines = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"] * done
    return "".join(f"data: {line}\n\n" for line in lines).encode()


@contextlib.asynccontextmanager
async def answering(body: bytes, status: int = 200, pieces: int = 1) -> AsyncIterator[str]:
    """A server that gives every request one answer, cut into `pieces`, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length" in head.lower():
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n".encode())
        size = -(-len(body) // pieces)
        for start in range(0, len(body), max(1, size)):
            writer.write(body[start : start + size])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        await server.wait_closed()


async def ask(body: bytes, api: Api = Api.COMPLETIONS, status: int = 200, pieces: int = 1) -> RequestOutcome:
    async with answering(body, status, pieces) as url:
        client = Client(url, api)
        try:
            return await client.send(CALL, {})
        finally:
            await client.close()


@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_a_whole_stream_is_counted_and_timed(pieces: int) -> None:
    outcome = await ask(stream(text("a"), text("\u2028b"), text("c", "length"), USAGE, REPORT), pieces=pieces)
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.output_tokens) == (5, 3)
    assert outcome.report == {"total_s": 1.0}
    assert len(outcome.token_s) == 3
    assert 0 < outcome.ttft_s <= outcome.token_s[-1] <= outcome.e2e_s
    assert outcome.tpot_s == pytest.approx(sum(outcome.itl_s) / 2)


async def test_without_usage_chunks_are_counted() -> None:
    outcome = await ask(stream(text("a"), text("b", "stop")))
    assert (outcome.prompt_tokens, outcome.output_tokens) == (CALL.prompt_tokens, 2)


async def test_who_speaks_and_why_a_chat_ended_are_no_tokens() -> None:
    body = stream(delta(role="assistant", content=""), delta(content="a"), delta(content=""), delta("stop"), USAGE)
    outcome = await ask(body, Api.CHAT)
    assert outcome.ok
    assert len(outcome.token_s) == 2


FAILURES = {
    "error event": (stream(text("a"), {"error": {"message": "the node died"}}, done=False), 200, "the node died"),
    "broken off": (stream(text("a"), done=False), 200, "broke off"),
    "cut in an event": (stream(text("a"), text("b", "stop"))[:-40], 200, "broke off"),
    "no token": (stream(), 200, "without a token"),
    "no JSON": (b"data: hello\n\n", 200, "hello"),
    "no chunk": (b'data: {"text": "a"}\n\n', 200, "not a chunk"),
    "refused": (b'{"error": {"message": "too many", "type": "x"}}', 429, "HTTP 429: too many"),
    "a proxy's page": (b"<html>bad gateway", 502, "HTTP 502: <html>bad gateway"),
}


@pytest.mark.parametrize(("body", "status", "message"), FAILURES.values(), ids=FAILURES)
async def test_what_is_no_whole_answer_is_a_failure(body: bytes, status: int, message: str) -> None:
    outcome = await ask(body, status=status)
    assert not outcome.ok
    assert message in outcome.error


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with answering(b"") as url:
        pass
    client = Client(url, Api.COMPLETIONS)
    outcome = await client.send(CALL, {})
    assert outcome.error.startswith("ConnectError")
    with pytest.raises(ConfigError, match="nothing answers"):
        await client.server()
    await client.close()


@pytest.mark.parametrize(("body", "status"), [(b"{}", 200), (b"hello", 200), (b'{"data": []}', 200), (b"no", 401)])
async def test_a_server_that_lists_no_model_is_refused(body: bytes, status: int) -> None:
    async with answering(body, status) as url:
        client = Client(url, Api.COMPLETIONS)
        with pytest.raises(ConfigError, match=r"--base-url: http://127.0.0.1:\d+/v1/models"):
            await client.server()
        await client.close()
