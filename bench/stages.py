"""Do the stages of a request sum to the time that its client measured?

The answer of a finished request carries its stages (`return_stages`). An aborted request has no answer. Its stages are
the difference of two readings of the stage histograms: long streams keep the other clients busy, so that no other
request ends between the readings. The client's clock runs on the bare socket, from before the first byte of the request
to the last byte of the answer, or to the abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from app.cluster import LocalCluster
from bench.cluster import metrics, total, until
from bench.connection import Connection

RELATIVE, ABSOLUTE_S = 0.02, 0.005
WANTED_SHARE = 0.99
ABORTED_SHARE = 0.1
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STAGES_SUM = "hackkv_request_stage_seconds_sum"
ENDED = "hackkv_requests_total"
BACKGROUND_TOKENS = 2000
SETTLE_S = 30.0
SETTLE_FIRST_S = 0.1
"""Pause before metrics are read. Rendering takes the router milliseconds, and would delay noticing the abort."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: its kind and its two times."""

    kind: str
    client_s: float
    stages_s: float

    @property
    def error_s(self) -> float:
        """The client's time that no stage accounts for; negative if the stages sum to more."""
        return self.client_s - self.stages_s

    @property
    def within(self) -> bool:
        """Whether the two times agree."""
        return abs(self.error_s) <= max(RELATIVE * self.client_s, ABSOLUTE_S)


async def measure(cluster: LocalCluster, requests: int, concurrency: int, seed: int, console: Console) -> list[Timed]:
    """Time `requests` requests, a tenth of them aborted."""
    rng, url = random.Random(seed), cluster.url
    aborted = round(requests * ABORTED_SHARE)
    with _steady(cluster), Progress(console=console, transient=True) as progress:
        await _finished(url, concurrency, concurrency, rng, lambda: None)  # opens the connections between nodes
        task = progress.add_task("requests", total=requests)
        finished = await _finished(url, requests - aborted, concurrency, rng, lambda: progress.advance(task))
        return finished + await _aborted(url, aborted, concurrency, rng, lambda: progress.advance(task))


@contextlib.contextmanager
def _steady(cluster: LocalCluster) -> Iterator[None]:
    """Keep waits for a core out of the measurement, if the process may (`CAP_SYS_NICE`).

    Neither this process nor the router may wait for a core when it reads its clock, and this process may not pause to
    collect garbage. On a machine with more work than cores such waits would show as time that no stage accounts for.
    """
    gc.freeze()
    pids = (os.getpid(), cluster.children[0].process.pid)
    with contextlib.suppress(PermissionError):
        for pid in pids:
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        gc.unfreeze()


def share_within(timed: list[Timed]) -> float:
    """Share of requests whose two times agree."""
    return sum(one.within for one in timed) / len(timed)


def report(timed: list[Timed], console: Console) -> None:
    """Print agreement by kind of request, and the worst cases."""
    table = Table("kind", "requests", "within max(2 %, 5 ms)", "client, median ms", "error p50 ms", "p99", "max")
    kinds = sorted({one.kind for one in timed})
    for name, group in [*((kind, [one for one in timed if one.kind == kind]) for kind in kinds), ("all", timed)]:
        errors = sorted(abs(one.error_s) * 1e3 for one in group)
        clients = sorted(one.client_s * 1e3 for one in group)
        row = (clients[len(group) // 2], errors[len(group) // 2], errors[int(len(group) * 0.99)], errors[-1])
        table.add_row(name, str(len(group)), f"{share_within(group):.2%}", *(f"{value:.2f}" for value in row))
    console.print(table)
    for one in sorted((one for one in timed if not one.within), key=lambda one: -abs(one.error_s))[:10]:
        console.print(f"  outside: {one.kind}: client {one.client_s * 1e3:.1f} ms, stages {one.stages_s * 1e3:.1f} ms")


async def _finished(
    url: str, requests: int, concurrency: int, rng: random.Random, done: Callable[[], None]
) -> list[Timed]:
    jobs = [_job(rng) for _ in range(requests)]
    timed: list[Timed] = []

    async def work() -> None:
        async with Connection.to(url) as connection:
            await connection.ask("GET", "/live")  # warms the connection before it is timed
            while jobs:
                kind, path, body = jobs.pop()
                timed.append(await _time_one(connection, kind, path, body))
                done()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    return timed


async def _time_one(connection: Connection, kind: str, path: str, body: dict[str, Any]) -> Timed:
    data = json.dumps(body).encode()
    began = perf_counter()
    answer = await connection.ask("POST", path, data)
    client_s = perf_counter() - began
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status}: {answer.body[:500]!r}")
    if not body["stream"]:
        return Timed(kind, client_s, answer.json()["hackkv"]["total_s"])
    events = answer.body.decode().split("\n\n")
    closing = json.loads(events[-3].removeprefix("data: "))  # before [DONE] and the empty rest
    return Timed(kind, client_s, closing["hackkv"]["total_s"])


def _job(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A random request: completion or chat, streamed or not, sometimes with two choices."""
    stream, chat = rng.random() < 0.5, rng.random() < 0.4
    body: dict[str, Any] = {
        "stream": stream,
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": True,
        "return_stages": True,
        "temperature": rng.choice((0, 1)),
        "n": 2 if rng.random() < 0.1 else 1,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": "what is " * rng.randint(1, 60)}]
    else:
        body["prompt"] = prompt(rng, rng.randint(1, 400))
    kind = f"{'chat' if chat else 'completion'}, {'streamed' if stream else 'whole'}"
    return kind, CHAT if chat else COMPLETIONS, body


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Random ids of the tiny model, without special tokens."""
    return [rng.randrange(3, 300) for _ in range(tokens)]


# Aborted requests --------------------------------------------------------------------------------------------------


async def _aborted(
    url: str, requests: int, concurrency: int, rng: random.Random, done: Callable[[], None]
) -> list[Timed]:
    timed: list[Timed] = []
    async with _background(url, concurrency - 1, rng):
        while len(timed) < requests:
            one = await _time_aborted(url, rng)
            if one is not None:
                timed.append(one)
                done()
    return timed


async def _time_aborted(url: str, rng: random.Random) -> Timed | None:
    """Abort one request. None if another request ended meanwhile: then the difference holds the stages of both."""
    kind, body, abort = rng.choice(
        (
            ("aborted before headers", _abortable(rng, 300, stream=False), _wait(rng.uniform(0.02, 0.3))),
            ("aborted in prefill", _abortable(rng, 2500, stream=True), _wait(rng.uniform(0.02, 0.5))),
            ("aborted in a stream", _abortable(rng, 100, stream=True), _read(rng.randint(1, 20))),
        )
    )
    data = json.dumps(body).encode()
    async with Connection.to(url) as connection:
        await connection.ask("GET", "/live")
        before = await metrics(url)
        began = perf_counter()
        await connection.send("POST", COMPLETIONS, data)
        await abort(connection)
        client_s = perf_counter() - began
        await connection.abort()
    await asyncio.sleep(SETTLE_FIRST_S)
    cancelled = f'{ENDED}{{outcome="cancelled"}}'
    after = before

    async def counted() -> bool:
        nonlocal after
        after = await metrics(url)
        return after.get(cancelled, 0.0) > before.get(cancelled, 0.0)

    await until(counted, SETTLE_S, "an aborted request is counted")
    if total(after, ENDED) != total(before, ENDED) + 1:
        return None
    return Timed(kind, client_s, total(after, STAGES_SUM) - total(before, STAGES_SUM))


def _abortable(rng: random.Random, tokens: int, *, stream: bool) -> dict[str, Any]:
    return {"prompt": prompt(rng, tokens), "max_tokens": BACKGROUND_TOKENS, "ignore_eos": True, "stream": stream}


def _wait(seconds: float) -> Callable[[Connection], Awaitable[None]]:
    async def wait(_: Connection) -> None:
        await asyncio.sleep(seconds)

    return wait


def _read(events: int) -> Callable[[Connection], Awaitable[None]]:
    async def read(connection: Connection) -> None:
        _, headers = await connection.begin()
        left = events
        async with contextlib.aclosing(connection.parts(headers)) as parts:  # type: ignore[type-var]
            async for _ in parts:
                left -= 1
                if not left:
                    return

    return read


@contextlib.asynccontextmanager
async def _background(url: str, streams: int, rng: random.Random) -> AsyncIterator[None]:
    """Keep `streams` long streams running; returns once each has begun to answer."""
    begun = asyncio.Semaphore(0)

    async def keep_streaming() -> None:
        while True:
            async with Connection.to(url) as connection:
                await connection.send("POST", COMPLETIONS, json.dumps(_abortable(rng, 50, stream=True)).encode())
                _, headers = await connection.begin()
                begun.release()
                async for _ in connection.parts(headers):
                    pass

    tasks = [asyncio.create_task(keep_streaming()) for _ in range(streams)]
    try:
        for _ in range(streams):
            await begun.acquire()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
