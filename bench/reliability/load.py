"""A steady stream of requests, and what each client got: its tokens, its errors, its waits.

Requests start at a fixed rate, as users' requests do, whatever becomes of earlier ones. Half of them are greedy. The
other half are sampled with a seed of their own. So each request has one right answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench.connection import Connection

REQUEST_S = 150.0
"""A request that takes longer counts as hung."""
PROMPT_TOKENS = (16, 256)
OUTPUT_TOKENS = (128, 384)
"""Outputs are so long that several requests are under way at any moment; a higher `--rate` makes them more."""
VOCABULARY = (3, 300)
"""Range of token ids for prompts; special tokens come before it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. Times are seconds since the first request of the run was due."""

    began_s: float
    ended_s: float
    longest_wait_s: float
    """The longest time between two events of its stream, or before the first one."""
    token_ids: tuple[int, ...]
    attempts: int
    error: str = ""
    """Empty if the request was served."""


def bodies(requests: int, seed: int) -> list[bytes]:
    """The bodies of the requests of a run; equal seeds give equal bodies."""
    rng = random.Random(seed)
    return [_body(rng, number) for number in range(requests)]


def _body(rng: random.Random, number: int) -> bytes:
    sampling: dict[str, Any] = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
    body = {
        "prompt": [rng.randrange(*VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))],
        "max_tokens": rng.randint(*OUTPUT_TOKENS),
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "return_stages": True,
    }
    return json.dumps({**body, **sampling}).encode()


async def steady(url: str, requests: list[bytes], rate: float, advance: Callable[[], None]) -> list[Outcome]:
    """Send `rate` requests a second; return every outcome, in the order of the requests."""
    began = perf_counter()

    async def one(number: int, body: bytes) -> Outcome:
        await asyncio.sleep(began + number / rate - perf_counter())
        outcome = await _ask(url, body, began)
        advance()
        return outcome

    return list(await asyncio.gather(*(one(number, body) for number, body in enumerate(requests))))


async def _ask(url: str, body: bytes, epoch: float) -> Outcome:
    client = _Client(epoch)
    try:
        async with asyncio.timeout(REQUEST_S), Connection.to(url) as connection:
            await connection.send("POST", "/v1/completions", body)
            status, headers = await connection.begin()
            parts = connection.parts(headers)
            if status != 200:
                client.error = f"{status} {b''.join([part async for part in parts]).decode()}"
            else:
                async for part in parts:
                    client.take(part)
                if not client.complete and not client.error:
                    client.error = "the stream ended early"
    except TimeoutError:
        client.error = f"hung for {REQUEST_S:g} s"
    except OSError as error:
        client.error = f"connection: {error}"
    return client.outcome()


class _Client:
    """Reads one stream of events."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._began = self._last = perf_counter()
        self._longest = 0.0
        self._rest = b""
        self._token_ids: list[int] = []
        self._attempts = 1
        self.complete, self.error = False, ""

    def take(self, part: bytes) -> None:
        now = perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            self._take_event(event.removeprefix(b"data: "))

    def _take_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"]["message"])
        for choice in event.get("choices", ()):
            self._token_ids += choice["token_ids"]
        if report := event.get("hackkv"):
            self._attempts = report["attempts"]

    def outcome(self) -> Outcome:
        now = perf_counter()
        times = (self._began - self._epoch, now - self._epoch, max(self._longest, now - self._last))
        return Outcome(*times, tuple(self._token_ids), self._attempts, self.error)
