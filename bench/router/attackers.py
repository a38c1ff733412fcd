"""Clients that send the worst that is allowed: `python -m bench.router.attackers URL SECONDS`.

Each kind of request is sent again and again by its own clients. At the end the answers are printed, counted by kind.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from time import monotonic

from bench.connection import Connection

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGEST = 16 << 20
SENTENCE = "the quick brown fox jumps over the lazy dog. "
SILENT = 100
"""Number of connections that send nothing, and of connections that send half a head."""


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body) of each kind of request."""
    text = SENTENCE * ((LARGEST - 1000) // len(SENTENCE))
    message = {"role": "user", "content": "x"}
    yield "16 MiB of prompt", COMPLETIONS, _json(prompt=text)
    yield "16 MiB of conversation", CHAT, _json(messages=[{**message, "content": text}])
    yield "16 MiB, one word", COMPLETIONS, _json(prompt="a" * (LARGEST - 100))
    yield "as much text as could fit", COMPLETIONS, _json(prompt=text[:390_000])
    yield (
        "60,000 ids, echoed with logprobs",
        COMPLETIONS,
        _json(prompt=list(range(1000, 4000)) * 20, max_tokens=2, echo=True, logprobs=20, seed=0),
    )
    yield "100 answers with logprobs", COMPLETIONS, _json(prompt="x", max_tokens=60, n=100, logprobs=20, seed=10)
    yield "100,000 ids", COMPLETIONS, _json(prompt=list(range(1000, 4000)) * 33)
    yield "8 million ids", COMPLETIONS, b'{"prompt": [1' + b",1" * (LARGEST // 2 - 100) + b"]}"
    yield "8 million wrong messages", CHAT, b'{"messages": [1' + b",1" * (LARGEST // 2 - 100) + b"]}"
    yield "400,000 right messages", CHAT, _json(messages=[message] * 400_000)
    yield "deep JSON", COMPLETIONS, b'{"prompt": ' + b"[" * (LARGEST // 2 - 100) + b"]" * (LARGEST // 2 - 100) + b"}"


def _json(**fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


async def attack(url: str, seconds: float) -> Counter[str]:
    """Send all kinds for `seconds`, each from a connection of its own. Returns the answers, counted by kind."""
    answers: Counter[str] = Counter()
    until = monotonic() + seconds

    async def repeat(name: str, path: str, body: bytes) -> None:
        while monotonic() < until:
            async with Connection.to(url) as connection:
                try:
                    answer = await connection.ask("POST", path, body)
                    answers[f"{name}: {answer.status}"] += 1
                except ConnectionError:
                    answers[f"{name}: connection lost"] += 1

    async def stay(begun: bytes) -> None:
        name = "half a head" if begun else "silence"
        async with Connection.to(url) as connection:
            await connection.send_raw(begun)
            try:
                status, _ = await connection.begin()
                answers[f"{name}: {status}"] += 1
            except ConnectionError:
                answers[f"{name}: connection lost"] += 1

    async def crumbs() -> None:
        while monotonic() < until:
            async with Connection.to(url) as connection:
                try:
                    await connection.send_raw(connection.head("POST", COMPLETIONS, "Transfer-Encoding: chunked"))
                    await connection.send_raw(b"1\r\n \r\n" * 100_000)
                    status, _ = await connection.begin()
                    answers[f"chunks of one byte: {status}"] += 1
                except ConnectionError:
                    answers["chunks of one byte: connection lost"] += 1
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        for name, path, body in bodies():
            tasks.create_task(repeat(name, path, body))
        for _ in range(SILENT):
            tasks.create_task(stay(b""))
            tasks.create_task(stay(b"GET / HTTP/1.1\r\nx-slow: "))
        tasks.create_task(crumbs())
    return answers


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(sys.argv[1], float(sys.argv[2])))))
