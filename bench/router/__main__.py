"""Does the router stand still? `python -m bench.router [cost|storm|turns|scale]`.

`cost`: processor time of a short request and of a token, by process; it is valid on a busy machine too.
`storm`: 200 clients stream from scripted nodes while others send bodies of 16 MiB, lists of 100,000 ids, deep JSON and
connections that say nothing, and have 60,000 ids echoed, or 100 answers given, with 20 log-probabilities a token.
`turns`: the longest turns of the event loops in that storm, in processor time; they are valid on a busy machine too.
`scale`: 2,000 open streams and 300 short requests a second. The router, the nodes, these clients and the attackers are
processes that share a machine. All is measured once more with a server in the router's place that only sends tokens
(`bench.router.plain`), while the attackers still attack the router. The delays that clients see with that server come
from the machine and from the clients themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from rich.console import Console

from bench.cluster import load_note
from bench.connection import Connection, Lender
from bench.router.cluster import Cluster, listed, running, since
from bench.router.cost import cost, cost_table, costs_little
from bench.router.streams import Times, anew, percentile, short_requests, stream, watch_loop
from bench.router.turns import FORGET, told, turns_table
from bench.sections import write_section
from hackkv.packaged import SHIPPED
from measure.accuracy.machine import commit, this_machine

DOCS = Path(__file__).resolve().parents[2] / "docs"
TARGET_GAP_MS, TARGET_ADDED_MS = 100.0, 10.0
STREAMS, PAUSE_MS = 200, 50
OPEN, SLOW_MS, REQUESTS_PER_S = 2000, 4000, 300
WARM_S = 3.0
CONNECTIONS = {"kept": "over connections that are kept open", "anew": "with a connection of its own each"}
"""Kind of connection that short requests have -> words for it."""


@contextlib.asynccontextmanager
async def streaming(url: str, count: int, pause_ms: int, seconds: float) -> AsyncIterator[Times]:
    """Run `count` streams that last longer than `seconds`. Enters when all have begun and `WARM_S` have passed."""
    times, begun = Times(), [asyncio.Event() for _ in range(count)]
    tokens = int(1000 * (seconds + count / 100 + 60) / pause_ms) + 2
    tasks = [asyncio.create_task(watch_loop(times))]
    try:
        for event in begun:
            tasks.append(asyncio.create_task(stream(anew(url), tokens, pause_ms, times, event)))
            await asyncio.sleep(0.005)
        for event in begun:
            await event.wait()
        await asyncio.sleep(WARM_S)
        yield times
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def summary(times: Times) -> dict[str, float]:
    """Statistics of times, in milliseconds."""
    return {
        "tokens": len(times.ages),
        "gap_p50_ms": 1e3 * percentile(times.gaps, 0.5),
        "gap_p99_ms": 1e3 * percentile(times.gaps, 0.99),
        "gap_max_ms": 1e3 * max(times.gaps, default=float("nan")),
        "added_p50_ms": 1e3 * percentile(times.ages, 0.5),
        "added_p99_ms": 1e3 * percentile(times.ages, 0.99),
        "added_max_ms": 1e3 * max(times.ages, default=float("nan")),
        "client_lag_p99_ms": 1e3 * percentile(times.lags, 0.99),
        "failures": len(times.failures),
    }


def clear(times: Times) -> None:
    """Drop the measurements so far."""
    times.gaps.clear()
    times.ages.clear()
    times.lags.clear()


async def storm(cluster: Cluster, seconds: float, streams: int, pause_ms: int) -> dict[str, Any]:
    """Measure streams alone, then beside attackers, then beside attackers without the router."""
    async with streaming(cluster.url, streams, pause_ms, 2 * seconds) as times:
        clear(times)
        used = cluster.processor_s()
        await asyncio.sleep(seconds)
        token_us = since(used, cluster.processor_s(), max(1, len(times.ages)) / 1e6)
        quiet, before = summary(times), cluster.memory_mib()
        clear(times)
        answers, most = await _attack(cluster, seconds)
        attacked = summary(times)
        await asyncio.sleep(WARM_S)
        memory = {"before_mib": before, "most_mib": most, "after_mib": cluster.memory_mib()}
    async with streaming(cluster.plain, streams, pause_ms, 2 * seconds) as times:
        clear(times)
        await _attack(cluster, seconds)
        plain = summary(times)
    return {
        "quiet": quiet, "attacked": attacked, "plain": plain, "answers": answers, "memory": memory,
        "token_us": token_us,
    }  # fmt: skip


async def _attack(cluster: Cluster, seconds: float) -> tuple[dict[str, int], float]:
    """Attack the router. Returns the counted answers, and the most memory that the router had meanwhile, in MiB."""
    attackers = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.router.attackers", cluster.url, str(seconds), stdout=PIPE
    )
    assert attackers.stdout is not None
    most, reading = 0.0, asyncio.create_task(attackers.stdout.read())
    while not reading.done():
        most = max(most, cluster.memory_mib())
        await asyncio.sleep(0.1)
    await attackers.wait()
    return json.loads(reading.result()), most


async def longest_turns(model: Path, seconds: float, streams: int, pause_ms: int) -> dict[str, dict[str, float]]:
    """Process -> the longest turns of its event loop, in seconds, while streams and attackers run."""
    with TemporaryDirectory() as folder:
        async with running(model, 1, Path(folder)) as cluster, streaming(cluster.url, streams, pause_ms, seconds):
            for process in (cluster.router, *cluster.nodes.values()):
                process.send_signal(FORGET)
            await _attack(cluster, seconds)
        return told(Path(folder))


async def scale(cluster: Cluster, seconds: float, streams: int, rate: float) -> dict[str, Any]:
    """Measure many slow streams beside short requests of a Poisson process; then the same without the router."""
    routed = await _crowd(cluster, cluster.url, seconds, streams, rate)
    plain = await _crowd(cluster, cluster.plain, seconds, streams, rate)
    return {**routed, "plain": plain}


async def _crowd(cluster: Cluster, url: str, seconds: float, streams: int, rate: float) -> dict[str, Any]:
    async with streaming(url, streams, SLOW_MS, 2 * seconds) as times, Connection.pooled(url) as lend:
        kept = await _short(cluster, lend, seconds, rate, times)
        return {"kept": kept, "anew": await _short(cluster, anew(url), seconds, rate, times)}


async def _short(cluster: Cluster, lend: Lender, seconds: float, rate: float, times: Times) -> dict[str, Any]:
    """Send short requests beside the streams of `times`."""
    await short_requests(lend, rate, WARM_S, Times())
    clear(times)
    short = Times(lags=times.lags)
    used, began = cluster.processor_s(), monotonic()
    await short_requests(lend, rate, seconds, short)
    took_s = monotonic() - began
    cores = since(used, cluster.processor_s(), took_s)
    return {
        "open": summary(times), "short": summary(short), "short_requests_per_s": len(short.gaps) / took_s,
        "cores": cores, "memory_mib": cluster.memory_mib(),
    }  # fmt: skip


def storm_table(result: dict[str, Any], streams: int, pause_ms: int) -> str:
    """The table of a storm in Markdown."""
    memory, rows = result["memory"], []
    for name, one in (
        ("quiet", result["quiet"]), ("attacked", result["attacked"]), ("attacked, without router", result["plain"]),
    ):  # fmt: skip
        rows.append(
            f"| {name} | {one['gap_p50_ms']:.0f} | {one['gap_p99_ms']:.0f} | {one['gap_max_ms']:.0f} | "
            f"{one['added_p99_ms']:.0f} | {one['client_lag_p99_ms']:.0f} | {one['failures']} |"
        )
    return "\n".join(
        (
            f"{streams} streams, a token every {pause_ms} ms; target: gap p99 below {TARGET_GAP_MS:.0f} ms also when "
            "attacked.",
            "",
            "| | gap p50, ms | gap p99 | gap max | added by router and wires, p99 | clients' own lag, p99 | failures |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Router memory: {memory['before_mib']:.0f} MiB before, {memory['most_mib']:.0f} at most, "
            f"{memory['after_mib']:.0f} after. Processor time while quiet, us a token: "
            f"{listed(result['token_us'], '.0f')}.",
            "",
            "Answers to the attackers: "
            + ", ".join(f"{name} ({n})" for name, n in sorted(result["answers"].items()))
            + ".",
        )
    )


def scale_table(result: dict[str, Any], streams: int, rate: float) -> str:
    """The table of `scale` in Markdown."""
    rows = [
        f"| {name}{where} | {one['tokens']} | {one['added_p50_ms']:.1f} | {one['added_p99_ms']:.1f} | "
        f"{one['client_lag_p99_ms']:.1f} | {one['failures']} |"
        for kind, told in CONNECTIONS.items()
        for where, what in (("", result[kind]), (", without router", result["plain"][kind]))
        for name, one in (
            (f"{rate:g} requests/s, {told}", what["short"]),
            (f"{streams} open streams beside these", what["open"]),
        )
    ]
    return "\n".join(
        (
            f"{streams} open streams with a token every {SLOW_MS / 1000:g} s, and {rate:g} requests/s of two tokens; "
            f"target: at most {TARGET_ADDED_MS:.0f} ms added at p99.",
            "",
            "| | tokens | added p50, ms | added p99, ms | clients' own lag, p99 | failures |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *(
                f"{told.capitalize()}: served {result[kind]['short_requests_per_s']:.0f} requests/s. Processor time, "
                f"cores: {listed(result[kind]['cores'], '.2f')}; the router's memory: {result[kind]['memory_mib']:.0f} "
                "MiB.\n"
                for kind, told in CONNECTIONS.items()
            ),
        )
    )


async def measure(arguments: argparse.Namespace) -> tuple[str, dict[str, Any], bool]:
    """Run one part. Returns its table, its numbers, and whether the target was met."""
    if arguments.what == "turns":
        streams = arguments.streams or STREAMS
        turns = await longest_turns(arguments.model, arguments.seconds, streams, arguments.pause)
        return turns_table(turns), turns, max(turns["router"].values()) * 1000 < TARGET_GAP_MS
    async with running(arguments.model, arguments.workers) as cluster:
        if arguments.what == "cost":
            result = await cost(
                cluster, arguments.seconds, arguments.streams or STREAMS, arguments.pause, arguments.rate
            )
            text, holds = cost_table(result), costs_little(result)
        elif arguments.what == "storm":
            streams = arguments.streams or STREAMS
            result = await storm(cluster, arguments.seconds, streams, arguments.pause)
            text = storm_table(result, streams, arguments.pause)
            holds = result["attacked"]["gap_p99_ms"] < TARGET_GAP_MS
        else:
            streams = arguments.streams or OPEN
            result = await scale(cluster, arguments.seconds, streams, arguments.rate)
            text = scale_table(result, streams, arguments.rate)
            holds = all(result[kind]["short"]["added_p99_ms"] <= TARGET_ADDED_MS for kind in CONNECTIONS)
    return text, result, holds


def main() -> int:
    """Run one part. The exit code is 0 if its target was met."""
    parser = argparse.ArgumentParser("python -m bench.router", description=__doc__)
    parser.add_argument("what", choices=("cost", "storm", "turns", "scale"))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=0, help=f"default: {OPEN} for scale, else {STREAMS}")
    parser.add_argument("--pause", type=int, default=PAUSE_MS, help="milliseconds between tokens (not of scale)")
    parser.add_argument("--rate", type=float, default=REQUESTS_PER_S, help="short requests a second (scale)")
    parser.add_argument("--workers", type=int, default=1, help="router.workers")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="folder with a tokenizer")
    parser.add_argument("--dry", action="store_true", help="do not write docs/router.md")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    text, numbers, holds = asyncio.run(measure(arguments))
    console = Console(highlight=False)
    console.print(text, markup=False, soft_wrap=True)
    if not arguments.dry:
        machine = this_machine("", 0)
        where = f"{machine.cpu}, {os.cpu_count()} cores, {machine.system}, {load_note()}; commit {commit()}"
        title = {
            "cost": "What a request and a token cost",
            "storm": "While others send the worst",
            "turns": "What takes the event loops longest",
            "scale": "Many streams",
        }[arguments.what]
        section = f"## {title}\n\n`python -m bench.router {' '.join(sys.argv[1:])}` · {where}\n\n{text}"
        write_section(DOCS, f"bench.router {arguments.what}", section, numbers, "router")
    console.print("[green]holds[/]" if holds else "[red]does not hold[/]")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
