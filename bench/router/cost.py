"""The cost of a short request and of a token: processor time of each process. A quiet machine is not needed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from bench.connection import Connection, Lender
from bench.router.cluster import Cluster, since
from bench.router.streams import Times, anew, short_requests, stream

TARGET_REQUEST_US, TARGET_TOKEN_US = 1000.0, 60.0
WARM_S = 1.0

_NAMES = {
    "requests": "a request of two tokens, with a connection of its own",
    "kept": "the same over a connection that was kept open",
    "tokens": "a token",
    "timed": "a token with its log-probability",
}


async def cost(cluster: Cluster, seconds: float, streams: int, pause_ms: int, rate: float) -> dict[str, Any]:
    """Process -> microseconds: of a short request at `rate` requests a second, and of a token of `streams` streams."""
    times = Times()
    requests = await _request(cluster, anew(cluster.url), seconds, rate, times)
    async with Connection.pooled(cluster.url) as lend:
        kept = await _request(cluster, lend, seconds, rate, times)
    tokens = await _token(cluster, seconds, streams, pause_ms, timed=False)
    timed = await _token(cluster, seconds, streams, pause_ms, timed=True)
    return {
        "requests": requests, "kept": kept, "tokens": tokens, "timed": timed, "rate": rate, "streams": streams,
        "pause_ms": pause_ms, "failures": len(times.failures),
    }  # fmt: skip


async def _request(cluster: Cluster, lend: Lender, seconds: float, rate: float, times: Times) -> dict[str, float]:
    await short_requests(lend, rate, WARM_S, Times())
    used = cluster.processor_s()
    count = await short_requests(lend, rate, seconds, times)
    return since(used, cluster.processor_s(), count / 1e6)


async def _token(cluster: Cluster, seconds: float, streams: int, pause_ms: int, *, timed: bool) -> dict[str, float]:
    times, begun = Times(), [asyncio.Event() for _ in range(streams)]
    tokens = int(1000 * (seconds + 60) / pause_ms)
    async with AsyncExitStack() as held:
        for event in begun:
            task = asyncio.create_task(stream(anew(cluster.url), tokens, pause_ms, times, event, timed=timed))
            held.callback(task.cancel)
        for event in begun:
            await event.wait()
        await asyncio.sleep(WARM_S)
        used, times.tokens = cluster.processor_s(), 0
        await asyncio.sleep(seconds)
        share = since(used, cluster.processor_s(), max(1, times.tokens) / 1e6)
    await asyncio.sleep(WARM_S)  # time for the router to notice that the clients have left
    return share


def costs_little(result: dict[str, Any]) -> bool:
    """Whether the router meets both targets."""
    router = {kind: sum(us for name, us in result[kind].items() if name.startswith("router")) for kind in _NAMES}
    return bool(router["requests"] <= TARGET_REQUEST_US and router["tokens"] <= TARGET_TOKEN_US)


def cost_table(result: dict[str, Any]) -> str:
    """The table of costs in Markdown."""
    processes = list(result["requests"])
    rows = [
        f"| {name} | " + " | ".join(f"{result[kind][process]:.0f}" for process in processes) + " |"
        for kind, name in _NAMES.items()
    ]
    return "\n".join(
        (
            f"{result['rate']:g} short requests a second, then {result['streams']} streams with a token every "
            f"{result['pause_ms']} ms. Targets for the router: {TARGET_REQUEST_US:.0f} us a request, "
            f"{TARGET_TOKEN_US:.0f} us a token.",
            "",
            "| processor time, us | " + " | ".join(processes) + " |",
            "|---" * (1 + len(processes)) + "|",
            *rows,
            "",
            f"Failures: {result['failures']}.",
        )
    )
