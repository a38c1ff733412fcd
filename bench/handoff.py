"""What the handoff of a prompt costs: `python -m bench.handoff [MODEL] [--tokens N] [--threads N] [--out docs]`.

The same prompt is answered with one token, which the prefill node gives, so no KV moves, and with two. The difference
is the handoff and one decode step: in seconds until the answer, and in processor time of each node. Both nodes share
the cores, as on a laptop. One cluster sends each layer in a frame of its own (`frame_bytes: 1`), the other one gathers
layers as it does by default. They take turns in one run. Differences are those of requests that follow each other;
medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import httpx

from app.cluster import ClusterPlan, LocalCluster, running
from bench.cluster import load_note, processor_s
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.shipped import find_model
from measure.accuracy.machine import this_machine
from prefill_node.config import PrefillSettings

ROUNDS: Final = 11
TIMEOUT_S: Final = 600.0
KEPT, MOVED = 1, 2
"""Tokens of an answer whose KV stays on the prefill node, and of one whose KV moves."""
HEAD: Final = (
    "| frames | KV stays, s | KV moves, s | longer by | prefill node, processor s | decode node, processor s |"
)


@dataclass(slots=True)
class Contender:
    """A cluster, and the times of its requests."""

    name: str
    cluster: LocalCluster
    client: httpx.AsyncClient
    times: dict[int, list[dict[str, float]]] = field(default_factory=lambda: {KEPT: [], MOVED: []})
    """Tokens of the answer -> seconds by what took them, request by request."""

    async def ask(self, prompt: list[int], tokens: int, salt: str) -> dict[str, float]:
        """Seconds until the answer, and processor seconds of each process. A new salt keeps pages from being shared."""
        before, began = processor_s(self.cluster), perf_counter()
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        (await self.client.post("/v1/completions", json=body)).raise_for_status()
        took, after = perf_counter() - began, processor_s(self.cluster)
        return {"seconds": took, **{name: after[name] - before[name] for name in after}}


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.handoff", description="What the handoff of a prompt costs.")
    parser.add_argument("model", nargs="?", default="", help="as for hackkv serve; default: the shipped model")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each node; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    began = load_note()
    lines = asyncio.run(measure(args.model, args.tokens, args.threads))
    print(HEAD, *lines, sep="\n")
    if args.out:
        said = " ".join(("python -m bench.handoff", *sys.argv[1:]))
        where = f"{this_machine('', args.threads).cpu}, {began}"
        about = f"`{said}` · codec {DEFAULT_CODEC}, {args.tokens} tokens, {args.threads} threads a node; {where}"
        text = "\n".join(("## What a handoff costs", "", about, "", HEAD, "|" + "---|" * 6, *lines))
        write_section(args.out, "handoff", text, {"where": where, "rows": lines})


async def measure(model: str, tokens: int, threads: int) -> list[str]:
    """The lines of the table."""
    folder = str(find_model(model, "bfloat16").path)
    kinds: Mapping[str, dict[str, Any]] = {
        "each layer by itself": {"frame_bytes": 1},
        f"of {PrefillSettings().frame_bytes >> 10} KiB": {},
    }
    prompt = [3 + at % 200 for at in range(tokens)]
    async with AsyncExitStack() as stack:
        contenders = [await _started(stack, name, folder, threads, own) for name, own in kinds.items()]
        for nth in range(ROUNDS + 1):
            for contender in contenders:
                for answer, times in contender.times.items():
                    found = await contender.ask(prompt, answer, f"{nth}-{answer}")
                    if nth:  # the first round warms up
                        times.append(found)
        return [line(contender.name, contender.times) for contender in contenders]


def line(name: str, times: Mapping[int, list[dict[str, float]]]) -> str:
    """A contender's line of the table."""
    kept, moved = times[KEPT], times[MOVED]
    more = _medians([{what: two[what] - one[what] for what in one} for one, two in zip(kept, moved, strict=True)])
    seconds = " | ".join(f"{_medians(each)['seconds']:.2f}" for each in (kept, moved))
    return f"| {name} | {seconds} | {more['seconds']:+.2f} | {more['prefill-0']:+.2f} | {more['decode-0']:+.2f} |"


async def _started(stack: AsyncExitStack, name: str, folder: str, threads: int, prefill: dict[str, Any]) -> Contender:
    worker = {"model": {"path": folder, "threads": threads}, "codec": {"name": DEFAULT_CODEC, "allow_loss": True}}
    router: dict[str, Any] = {"listen": {"port": 0}, "control": {"port": 0}, "model": folder}
    plan = ClusterPlan(router, worker, num_prefill=1, num_decode=1, prefill=prefill)
    cluster = await stack.enter_async_context(running(plan, lambda _: None))
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S))
    return Contender(name, cluster, client)


def _medians(times: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in times) for name in times[0]}


if __name__ == "__main__":
    main()
