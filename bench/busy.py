"""Tokens a second beside busy loops: `python -m bench.busy [MODEL] [--threads N] [--out docs]`.

A cluster of one prefill and one decode node answers a few requests at a time, again and again, while none, one or two
processes do nothing but count. A machine of c cores that shares them fairly leaves the cluster c / (c + k) of itself
beside k loops, and more if the cluster did not need all of it. A cluster whose waiting threads spin loses more, because
they take processor time from threads that compute. Numbers of loops take turns in one run; the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final

import httpx

from app.cluster import ClusterPlan, running
from bench.cluster import load_note
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.shipped import find_model
from measure.accuracy.machine import this_machine

LOOPS: Final = (0, 1, 2)
ROUNDS: Final = 5
CLIENTS: Final = 4
TOKENS: Final = 96
PROMPT: Final = 400
TIMEOUT_S: Final = 600.0
HEAD: Final = "| busy loops | tokens/s | of none | a fair share |"


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.busy", description="Tokens a second beside busy loops.")
    parser.add_argument("model", nargs="?", default="", help="as for hackkv serve; default: the shipped model")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each node")
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    began = load_note()
    speeds = asyncio.run(measure(args.model, args.threads))
    lines = table(speeds, os.cpu_count() or 1)
    print(HEAD, *lines, sep="\n")
    if args.out:
        said = " ".join(("python -m bench.busy", *sys.argv[1:]))
        where = f"{this_machine('', args.threads).cpu}, {began}"
        about = (
            f"`{said}` · {args.model or 'hackkv-small'}, codec {DEFAULT_CODEC}, {CLIENTS} requests at a time of "
            f"{PROMPT} + {TOKENS} tokens, {args.threads} threads a node; {where}"
        )
        text = "\n".join(("## Beside busy loops", "", about, "", HEAD, "|" + "---|" * 4, *lines))
        write_section(args.out, "busy", text, {"where": where, "tokens_per_s": speeds})


async def measure(model: str, threads: int) -> dict[int, list[float]]:
    """Busy loops -> tokens a second, round by round."""
    folder = str(find_model(model, "bfloat16").path)
    worker = {"model": {"path": folder, "threads": threads}, "codec": {"name": DEFAULT_CODEC, "allow_loss": True}}
    router: dict[str, Any] = {"listen": {"port": 0}, "control": {"port": 0}, "model": folder}
    speeds: dict[int, list[float]] = {loops: [] for loops in LOOPS}
    async with (
        running(ClusterPlan(router, worker, num_prefill=1, num_decode=1), lambda _: None) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as client,
    ):
        await _answered(client, "warm")
        for nth in range(ROUNDS):
            for loops, found in speeds.items():
                with busy(loops):
                    found.append(await _answered(client, f"{nth}-{loops}"))
    return speeds


async def _answered(client: httpx.AsyncClient, salt: str) -> float:
    """Tokens a second of `CLIENTS` requests at once, prompts included. A round's own salt keeps it from reusing pages
    of another round."""
    began = monotonic()
    await asyncio.gather(*(_ask(client, f"{salt}-{nth}") for nth in range(CLIENTS)))
    return CLIENTS * TOKENS / (monotonic() - began)


async def _ask(client: httpx.AsyncClient, salt: str) -> None:
    body = {"prompt": list(range(3, 3 + PROMPT)), "max_tokens": TOKENS, "ignore_eos": True, "cache_salt": salt}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()


@contextmanager
def busy(loops: int) -> Iterator[list[SpawnProcess]]:
    """While the context is open, `loops` processes do nothing but count."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count, daemon=True) for _ in range(loops)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _count() -> None:
    # Linux divides processor time among sessions first (sched_autogroup). A loop in the shell's session would share the
    # shell's part; a node has a session of its own, so the loop gets one too.
    os.setsid()
    number = 0
    while True:
        number += 1


def table(speeds: dict[int, list[float]], cores: int) -> list[str]:
    """A line for each number of loops."""
    alone = median(speeds[LOOPS[0]])
    return [
        f"| {loops} | {median(found):.0f} | {median(found) / alone:.2f} | {cores / (cores + loops):.2f} |"
        for loops, found in speeds.items()
    ]


if __name__ == "__main__":
    main()
