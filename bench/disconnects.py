"""A thousand clients that leave at random points: is everything that they held given back?

Before and after the storm every node reports what it holds (`Describe`: pages, queued tokens, sequences, outbox bytes),
and the router's gauges are read. The values must be the same before and after, no process may have died, and none may
have grown without bound.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from app.cluster import LocalCluster
from bench.cluster import dead, describe, memory_mib, metrics, until
from bench.connection import Connection
from bench.stages import CHAT, COMPLETIONS, prompt

REQUEST_S = 120.0
"""A request that takes longer counts as hung."""
BASELINE_S = 10.0
MAX_GROWTH_MIB = 100.0
OUTBOX = ("hackkv_host_pool_waiting_bytes", "hackkv_host_pool_kept_bytes")
GAUGES = (
    "hackkv_router_inflight",
    "hackkv_node_tokens",
    "hackkv_kv_pages",
    "hackkv_host_pool_waiting_bytes",
    "vllm:num_requests",
)
WARM_UP = 32

Leave = Callable[[Connection, random.Random], Awaitable[str]]
"""Sends a request and leaves in the middle of it; returns how it ended."""


@dataclass(frozen=True, slots=True)
class Storm:
    """The outcome of a storm."""

    endings: Counter[str]
    elapsed_s: float
    baseline_s: float | None
    """Seconds until every value was back; None if that took too long."""
    left_over: dict[str, tuple[float, float]]
    """Values that did not return: name -> (before, after)."""
    dead: list[str]
    before_mib: dict[str, float]
    after_mib: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether every value came back, no process died, no client hung, and memory is bounded."""
        grown = max((self.after_mib[name] - self.before_mib[name] for name in self.after_mib), default=0.0)
        healthy = not self.dead and not self.left_over and not self.endings["hung"] and not self.endings["wrong"]
        return healthy and grown <= MAX_GROWTH_MIB


async def storm(cluster: LocalCluster, requests: int, concurrency: int, seed: int, console: Console) -> Storm:
    """Let `requests` clients come and go, `concurrency` at a time."""
    rng = random.Random(seed)
    endings: Counter[str] = Counter()
    await asyncio.gather(*(_one(cluster.url, _finish, random.Random(rng.random())) for _ in range(WARM_UP)))
    await until(lambda: _idle(cluster), BASELINE_S, "an idle cluster")
    before, before_mib = await _held(cluster), memory_mib(cluster)
    began = perf_counter()
    places = asyncio.Semaphore(concurrency)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("disconnects", total=requests)

        async def one(leave: Leave, own: random.Random) -> None:
            async with places:
                endings[await _one(cluster.url, leave, own)] += 1
            progress.advance(bar)

        ways = [rng.choices(WAYS, weights=WEIGHTS)[0] for _ in range(requests)]
        await asyncio.gather(*(one(leave, random.Random(rng.random())) for leave in ways))
    ended = perf_counter()
    baseline_s = await _time_to_baseline(cluster, before)
    left_over = {} if baseline_s is not None else _difference(before, await _held(cluster))
    endings[await _one(cluster.url, _finish, rng)] += 1  # it still serves
    return Storm(endings, ended - began, baseline_s, left_over, dead(cluster), before_mib, memory_mib(cluster))


def report(result: Storm, console: Console) -> None:
    """Print how clients left, which values did not return, and the size of the processes."""
    table = Table("ending", "clients", title=f"{result.endings.total()} clients in {result.elapsed_s:.1f} s")
    for ending, count in result.endings.most_common():
        table.add_row(ending, str(count))
    console.print(table)
    memory = Table("process", "before, MiB", "after, MiB", title="resident memory")
    for name, after in result.after_mib.items():
        memory.add_row(name, f"{result.before_mib[name]:.0f}", f"{after:.0f}")
    console.print(memory)
    if result.baseline_s is not None:
        console.print(f"everything was back {result.baseline_s:.2f} s after the last client left")
    for name, (was, now) in result.left_over.items():
        console.print(f"[red]{name}: {was:g} before, {now:g} after[/]")
    for name in result.dead:
        console.print(f"[red]{name} died[/]")


async def _held(cluster: LocalCluster) -> dict[str, float]:
    """Everything that a request holds while it is served, by name."""
    held = {key: value for key, value in (await metrics(cluster.url)).items() if key.startswith(GAUGES)}
    for info in await describe(cluster):
        numbers = {
            "free pages": info.free_pages,
            "queued tokens": info.queued_tokens,
            "running": info.running,
            "waiting": info.waiting,
            "outbox bytes": sum(dict(info.stats).get(name, 0.0) for name in OUTBOX),
        }
        held |= {f"{info.node_id}: {name}": float(value) for name, value in numbers.items()}
    router = psutil.Process(cluster.children[0].process.pid)
    # A client's connection that is never closed shows here. The nodes' own connections are on other ports.
    http_port = int(cluster.url.rpartition(":")[2])
    clients = [each for each in router.net_connections("tcp") if each.laddr.port == http_port and each.raddr]
    held["router: open client connections"] = float(len(clients) - 1)  # less the one that asked for the metrics
    return held


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    names = before.keys() | after.keys()
    pairs = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in sorted(names)}
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


async def _time_to_baseline(cluster: LocalCluster, before: dict[str, float]) -> float | None:
    async def back() -> bool:
        return not _difference(before, await _held(cluster))

    try:
        return await until(back, BASELINE_S, "the baseline")
    except TimeoutError:
        return None


async def _idle(cluster: LocalCluster) -> bool:
    held = await _held(cluster)
    busy = ("hackkv_router_inflight", "hackkv_node_tokens", "hackkv_host_pool_waiting", "vllm:num_requests")
    return not any(value for name, value in held.items() if name.startswith(busy) or 'state="used"' in name)


# Ways to leave -----------------------------------------------------------------------------------------------------


async def visit(url: str, rng: random.Random) -> str:
    """Be one client that finishes or leaves somewhere; return how it ended."""
    return await _one(url, rng.choices(WAYS, weights=WEIGHTS)[0], rng)


async def _one(url: str, leave: Leave, rng: random.Random) -> str:
    try:
        async with asyncio.timeout(REQUEST_S), Connection.to(url) as connection:
            return await leave(connection, rng)
    except TimeoutError:
        return "hung"
    except ConnectionError:
        return "wrong"


def _body(rng: random.Random, tokens: int, max_tokens: int, *, stream: bool) -> tuple[str, bytes]:
    body: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    if rng.random() < 0.3:
        body["messages"] = [{"role": "user", "content": "word " * (tokens // 3 + 1)}]
        return CHAT, json.dumps(body).encode()
    body["n"] = rng.choice((1, 1, 1, 2))
    body["prompt"] = prompt(rng, tokens)
    return COMPLETIONS, json.dumps(body).encode()


async def _in_body(connection: Connection, rng: random.Random) -> str:
    path, body = _body(rng, 50, 50, stream=True)
    head = connection.head("POST", path, f"Content-Length: {len(body)}")
    await connection.send_raw((head + body)[: rng.randrange(len(head) + len(body))])
    return "left inside the request"


async def _before_headers(connection: Connection, rng: random.Random) -> str:
    path, body = _body(rng, rng.randint(1, 300), 200, stream=rng.random() < 0.5)
    await connection.send("POST", path, body)
    await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.3))))
    return "left before the headers"


async def _mid_prefill(connection: Connection, rng: random.Random) -> str:
    path, body = _body(rng, rng.randint(1000, 3000), 50, stream=rng.random() < 0.5)
    await connection.send("POST", path, body)
    await asyncio.sleep(rng.uniform(0.02, 0.5))
    return "left while a long prompt was prefilled"


async def _mid_stream(connection: Connection, rng: random.Random) -> str:
    path, body = _body(rng, rng.randint(1, 200), 300, stream=True)
    await connection.send("POST", path, body)
    status, headers = await connection.begin()
    if status != 200:
        return "wrong"
    left = rng.randint(0, 30)
    async for _ in connection.parts(headers):
        if not left:
            break
        left -= 1
    return "left in the stream"


async def _finish(connection: Connection, rng: random.Random) -> str:
    path, body = _body(rng, rng.randint(1, 200), 20, stream=rng.random() < 0.5)
    answer = await connection.ask("POST", path, body)
    return "stayed to the end" if answer.status == 200 else "wrong"


WAYS: tuple[Leave, ...] = (_in_body, _before_headers, _mid_prefill, _mid_stream, _finish)
WEIGHTS = (10, 30, 15, 35, 10)
