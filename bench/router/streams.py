"""Clients that stream, and the arrival times of their tokens."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from bench.connection import Connection, Lender

COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Times:
    """The measurements of clients, in seconds."""

    gaps: list[float] = field(default_factory=list)
    """Times between two tokens of one stream."""
    ages: list[float] = field(default_factory=list)
    """Times from a node's sending of a token to its arrival at a client: the delay by router and wires."""
    lags: list[float] = field(default_factory=list)
    """Delays of the clients' own event loop. Their measurements are no more exact than that."""
    failures: list[str] = field(default_factory=list)
    tokens: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; NaN if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def stream(
    lend: Lender, tokens: int, pause_ms: int, times: Times, begun: asyncio.Event | None = None, *, timed: bool = True
) -> None:
    """Read one stream to its end, over a connection of `lend`. Ages and gaps of tokens are measured only if it is
    `timed`."""
    body: dict[str, object] = {"prompt": "the quick", "max_tokens": tokens, "seed": pause_ms, "stream": True}
    if timed:
        body["logprobs"] = 0
    last = None
    try:
        async with lend() as connection:
            await connection.send("POST", COMPLETIONS, json.dumps(body).encode())
            status, headers = await connection.begin()
            async for part in connection.parts(headers):
                now = monotonic()
                if status != 200:
                    raise ConnectionError(f"{status}: {part[:200]!r}")
                if begun is not None:
                    begun.set()
                times.tokens += part.startswith(b"data: {")
                if (sent := _sent_at(part)) is None:
                    continue
                times.ages.append(now - sent)
                if last is not None:
                    times.gaps.append(now - last)
                last = now
    except (ConnectionError, OSError) as error:
        times.failures.append(repr(error))
    finally:
        if begun is not None:
            begun.set()


def anew(url: str) -> Lender:
    """Opens a connection for each request."""
    return partial(Connection.to, url)


async def short_requests(lend: Lender, rate: float, seconds: float, times: Times) -> int:
    """Send requests of two tokens as a Poisson process. Returns their number when all are over."""
    rng, tasks, began, count = random.Random(1), set[asyncio.Task[None]](), monotonic(), 0
    due = began
    while due - began < seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(due - monotonic())
        task = asyncio.create_task(stream(lend, 2, 0, times))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        count += 1
    if tasks:
        await asyncio.wait(tasks)
    return count


def _sent_at(part: bytes) -> float | None:
    """The time at which a node sent the token of an event; None for events without a timed token."""
    at = part.find(b'"token_logprobs":[-')
    return float(part[at + 19 : part.index(b"]", at)]) if at >= 0 else None


async def watch_loop(times: Times, period_s: float = 0.01) -> None:
    """Record the delay of this process's own event loop, until cancelled."""
    while True:
        due = monotonic() + period_s
        await asyncio.sleep(period_s)
        times.lags.append(monotonic() - due)
