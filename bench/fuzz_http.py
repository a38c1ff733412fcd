"""Malformed HTTP bodies, sent to a live router. Every answer must be a named error, unless the body was valid.

The router must never answer 500, never leave out OpenAI's envelope, and never drop a connection without an answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.connection import Answer, Connection
from bench.stages import CHAT, COMPLETIONS
from router.api.schema import ChatRequest, CompletionRequest

ANSWER_S = 30.0
MAX_BODY_BYTES = 1 << 20
"""The largest body that the attacked router accepts. It is small, so that oversized bodies are cheap."""
REFUSALS = frozenset({400, 404, 408, 413, 429})
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}
ATOMS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**400, 1.5, -0.0, 1e308, "", "x",
    "é\u0000", "\ud800", "<|end|>" * 3, [], {}, [[]], [None], [1, ""], [[1, 2], "x"], {"a": {}}, [-1], [1 << 40], [600],
)  # fmt: skip
ROLES: tuple[Any, ...] = ("user", "system", "assistant", "tool", "", 7, None)


class Unnamed(AssertionError):
    """An answer that is neither a result nor a named error."""


def hostile_body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that is very probably not a valid request."""
    path = rng.choice((COMPLETIONS, CHAT))
    body: dict[str, Any] = dict(VALID[path])
    match rng.randrange(9):
        case 0 | 1:
            for _ in range(rng.randint(1, 3)):
                body[rng.choice(FIELDS)] = rng.choice(ATOMS)
            return path, _dumped(rng, body)
        case 2:
            body[rng.choice(("promt", "Temperature", "max_token", "", "\u0000", "__class__", "n" * 5000))] = 1
            return path, _dumped(rng, body)
        case 3:
            return path, _dumped(rng, _messages(rng) if path == CHAT else {**body, "prompt": _nested(rng)})
        case 4:
            return path, _broken(rng, _dumped(rng, body))
        case 5:
            return path, _deep(rng)
        case 6:
            field = rng.choice(FIELDS).encode()
            number = rng.choice((b"1e999", b"-1e999", b"9" * 5000, b"NaN", b"Infinity", b"0x10", b"1" + b"0" * 400))
            return path, b'{"prompt": "x", "' + field + b'": ' + number + b"}"
        case 7:
            return path, rng.choice((b"", b"null", b"[]", b'"x"', b"1", b"true", rng.randbytes(rng.randrange(200))))
        case _:
            return path, json.dumps(rng.choice(ATOMS)).encode("utf-8", "surrogatepass")


def _dumped(rng: random.Random, body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _messages(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": rng.choice(ROLES), "content": rng.choice(ATOMS)}
    if rng.random() < 0.5:
        message["content"] = [{"type": rng.choice(("text", "image_url", 3)), "text": rng.choice(ATOMS)}]
    if rng.random() < 0.3:
        message[rng.choice(("name", "tool_calls", "audio", "refusal", "x"))] = rng.choice(ATOMS)
    return {"messages": rng.choice(([message], [message] * 3, message, [[message]])), "max_tokens": 1}


def _nested(rng: random.Random) -> Any:
    value: Any = rng.choice(ATOMS)
    for _ in range(rng.randint(1, 20)):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _broken(rng: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    match rng.randrange(4):
        case 0:
            del spoiled[rng.randrange(len(spoiled)) :]
        case 1:
            for _ in range(rng.randint(1, 4)):
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        case 2:
            at = rng.randrange(len(spoiled))
            spoiled[at:at] = rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00"))
        case _:
            spoiled = bytearray(data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7"))))
    return bytes(spoiled)


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((50, 200, 1000, 20_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    field = rng.choice((b"prompt", b"messages", b"logit_bias", b"metadata", b"chat_template_kwargs", b"x"))
    return b'{"prompt": "x", "' + field + b'": ' + opening * depth + b"1" + closing * depth + b"}"


async def _send(connection: Connection, rng: random.Random, path: str, body: bytes) -> None:
    """Send a body in one piece with its length, or in HTTP chunks. Now and then send one that is too large."""
    if rng.random() > 0.02:
        if rng.random() < 0.8:
            await connection.send("POST", path, body)
            return
        pieces = [body[:7], body[7:]]
    else:
        pieces = [b" " * (64 << 10)] * (MAX_BODY_BYTES // (64 << 10) + 1)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    await connection.send_raw(connection.head("POST", path, "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n")


def name_of(answer: Answer) -> str:
    """The name of the router's answer. Raises `Unnamed` if it is neither a result nor a named error."""
    if answer.status == 200:
        content = answer.headers.get("content-type", "")
        if not content.startswith(("application/json", "text/event-stream")):
            raise Unnamed(f"200 with content type {content!r}: {answer.body[:300]!r}")
        return "valid after all"
    if answer.status not in REFUSALS:
        raise Unnamed(f"{answer.status}: {answer.body[:300]!r}")
    try:
        error = answer.json()["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError) as wrong:
        raise Unnamed(f"{answer.status}: {answer.body[:300]!r}") from wrong
    if not (isinstance(code, str) and code and isinstance(message, str) and message):
        raise Unnamed(f"{answer.status}: {answer.body[:300]!r}")
    return f"{answer.status} {code}"


async def attack_http(url: str, count: int, concurrency: int, seed: int, done: Callable[[int], None]) -> Counter[str]:
    """Send `count` hostile bodies. Raises `Unnamed`, or `TimeoutError` if an answer never comes."""
    endings: Counter[str] = Counter()
    left = count

    async def work(rng: random.Random) -> None:
        nonlocal left
        while left > 0:
            async with Connection.to(url) as connection:
                keep = True
                while keep and left > 0:
                    left -= 1
                    keep = await one(connection, rng)
                    done(1)

    async def one(connection: Connection, rng: random.Random) -> bool:
        path, body = hostile_body(rng)
        try:
            async with asyncio.timeout(ANSWER_S):
                with_error = None
                try:
                    await _send(connection, rng, path, body)
                except ConnectionError as error:  # refused before the whole body was sent; the answer can still be read
                    with_error = error
                answer = await connection.finish()
            name = name_of(answer)
        except (Unnamed, ConnectionError, TimeoutError) as error:
            raise Unnamed(f"{path} {body[:300]!r} ({len(body)} bytes): {error!r}") from error
        endings[name] += 1
        return with_error is None and answer.headers.get("connection") != "close"

    async with asyncio.TaskGroup() as tasks:
        for place in range(concurrency):
            tasks.create_task(work(random.Random(seed + place)))
    return endings
