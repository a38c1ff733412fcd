"""A decode node with a tenth of the memory that its load wants, beside one with all of it: `python -m bench.swap`.

Two clusters of real processes serve the same requests side by side, each with three times as many at once as a decode
step takes. They share the machine's cores, so whatever else it does touches both; the one that does more work per token
gets fewer tokens. Throughput is what the decode nodes generate while the load stands. Every output of the small node is
compared with the large node's, which never swaps. `--seconds 600` is the long form; `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
from hack_kernels import load
from rich.console import Console
from rich.progress import Progress

from bench.cluster import TINY, dead, describe, load_note, metrics, total
from bench.connection import Connection
from hackkv.cluster import ClusterPlan, LocalCluster, running
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.errors import DeadlineExceeded
from hackkv.model.tiny import write_tiny
from hackkv.types import NodeInfo, Role

MAX_BATCH = 64
LOAD = 3
SHARE = 0.1
WANTED = 0.9
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 160), (64, 384)
REQUESTS = 600
"""Different requests; they come round again."""
WARM_S, WINDOW_S = 15.0, 10.0
REQUEST_S = 900.0
COUNTERS = ("hackkv_swap_out_total", "hackkv_swap_in_total", "hackkv_swapped_seconds_total")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, as HTTP has it."""

    prompt: tuple[int, ...]
    output: int
    seed: int

    @property
    def tokens(self) -> int:
        """Its length in the end."""
        return len(self.prompt) + self.output

    def body(self) -> bytes:
        """Every second one samples."""
        chosen = {"temperature": 0.8 * (self.seed % 2), "seed": self.seed, "ignore_eos": True, "return_token_ids": True}
        return json.dumps({"prompt": self.prompt, "max_tokens": self.output, **chosen}).encode()


@dataclass(slots=True)
class Side:
    """One of the two clusters and what it did."""

    name: str
    cluster: LocalCluster
    pages: int
    windows: list[float] = field(default_factory=list)
    """Tokens per second of each window."""
    tokens: float = 0.0
    cpu_s: float = 0.0
    """Of the decode node, in the same time."""
    batches: list[int] = field(default_factory=list)
    """Sequences in a step, looked at once a second."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    served: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    async def decode(self) -> NodeInfo:
        """What its decode node says of itself, however busy the machine is."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                (info,) = [info for info in await describe(self.cluster) if info.role is Role.DECODE]
                return info

    def cpu_time(self) -> float:
        """CPU seconds of its decode node so far."""
        (member,) = [member for member in self.cluster.members if member.name == "decode-0"]
        times = psutil.Process(member.process.pid).cpu_times()
        return times.user + times.system

    async def generated(self) -> float:
        """Tokens that its decode node has generated."""
        return dict((await self.decode()).stats)["hackkv_generated_tokens_total"]


@dataclass(frozen=True, slots=True)
class Result:
    """What is kept."""

    settings: dict[str, Any]
    machine: str
    ample_tokens_per_s: list[float]
    tight_tokens_per_s: list[float]
    ratio: float
    """Of the tokens per second of both."""
    cpu_ratio: float
    """The same per CPU second of the decode nodes: what a machine with a core to spare for each would show."""
    mean_batch: dict[str, float]
    requests: dict[str, int]
    failures: dict[str, int]
    different_outputs: int
    compared_outputs: int
    recomputed_tokens: float
    dead: list[str]
    tight: dict[str, float]
    ample_swaps: float

    @property
    def holds(self) -> bool:
        """All that the issue asks for."""
        right = not (self.failures or self.different_outputs or self.recomputed_tokens or self.dead)
        return right and self.compared_outputs > 0 and self.tight["hackkv_swap_out_total"] > 0 and self.ratio >= WANTED


def jobs(seed: int) -> list[Job]:
    """The requests."""
    rng = random.Random(seed)
    return [
        Job(tuple(rng.randrange(3, 500) for _ in range(rng.randint(*PROMPT_TOKENS))), rng.randint(*OUTPUT_TOKENS), i)
        for i in range(REQUESTS)
    ]


async def serve_forever(side: Side, work: list[Job], order: Iterator[int], stop: asyncio.Event) -> None:
    """One client: one request after another, each to its end."""
    while not stop.is_set():
        index = next(order)
        async with asyncio.timeout(REQUEST_S), Connection.to(side.cluster.url) as connection:
            answer = await connection.ask("POST", "/v1/completions", work[index].body())
        if answer.status != 200:
            side.failures[f"{answer.status}: {answer.body[:200].decode(errors='replace')}"] += 1
            continue
        side.served += 1
        tokens = answer.json()["choices"][0]["token_ids"]
        if side.outputs.setdefault(index, tokens) != tokens:
            side.failures["a request got other tokens the second time"] += 1


async def play(side: Side, work: list[Job], windows: int, window_done: Callable[[], None]) -> None:
    """Put the load on one side, and measure once it stands, window by window."""
    stop, order = asyncio.Event(), cycle(range(REQUESTS))
    clients = [asyncio.create_task(serve_forever(side, work, order, stop)) for _ in range(LOAD * MAX_BATCH)]
    try:
        await asyncio.sleep(WARM_S)
        cpu_s, first = side.cpu_time(), await side.generated()
        before, began = first, perf_counter()
        for _ in range(windows):
            while perf_counter() - began < WINDOW_S:
                await asyncio.sleep(1.0)
                side.batches.append((await side.decode()).running)
            after, ended = await side.generated(), perf_counter()
            side.windows.append((after - before) / (ended - began))
            before, began = after, ended
            window_done()
        side.tokens, side.cpu_s = before - first, side.cpu_time() - cpu_s
        stop.set()
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def plan(model: str, kv_bytes: int, codec: str) -> ClusterPlan:
    """One prefill and one decode node; they differ in the decode node's pages only."""
    worker = {"model": {"path": model, "dtype": "float32", "threads": 1}, "codec": {"name": codec}}
    # A lease that outlives a busy machine: what is tried here is memory, and nobody is to be taken for dead.
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model, "lease_ttl_s": 30.0}
    decode = {"kv_bytes": kv_bytes, "max_batch": MAX_BATCH, "max_sequences": 2 * MAX_BATCH}
    return ClusterPlan(router, worker, 1, 1, prefill={"kv_bytes": 64 << 20}, decode=decode)


async def measure(arguments: argparse.Namespace, model: str, console: Console) -> Result:
    """Run both sides at once."""
    work = jobs(arguments.seed)
    pages, page_bytes = demand(work, arguments.codec)
    tight_pages = round(SHARE * pages)
    windows = max(1, round(arguments.seconds / WINDOW_S))
    async with (
        running(plan(model, pages * page_bytes, arguments.codec), lambda _: None) as large,
        running(plan(model, tight_pages * page_bytes, arguments.codec), lambda _: None) as small,
    ):
        ample, tight = Side("ample", large, pages), Side("tight", small, tight_pages)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("windows", total=2 * windows)
            await asyncio.gather(*(play(side, work, windows, lambda: progress.advance(bar)) for side in (ample, tight)))
        return await verdict(ample, tight, arguments)


def demand(work: list[Job], codec_name: str) -> tuple[int, int]:
    """Pages that the load would hold if every request of it were there at its full length, and the bytes of a page."""
    codec = make_codec(CodecConfig(name=codec_name), TINY.head_dim, load("reference"))
    pages = mean(-(-job.tokens // codec.format.page_tokens) for job in work)
    return round(LOAD * MAX_BATCH * pages), codec.format.resident_bytes * TINY.layers * TINY.kv_heads


async def verdict(ample: Side, tight: Side, arguments: argparse.Namespace) -> Result:
    """Compare what both sides did."""
    common = ample.outputs.keys() & tight.outputs.keys()
    stats = dict((await tight.decode()).stats)
    recomputed = 0.0
    for side in (ample, tight):
        page = await metrics(side.cluster.url)
        recomputed += total(page, "hackkv_prompt_tokens_recomputed_total") + total(page, "hackkv_replayed_tokens_total")
    settings = {
        "codec": arguments.codec,
        "max_batch": MAX_BATCH,
        "clients": LOAD * MAX_BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "demand_pages": ample.pages,
        "tight_pages": tight.pages,
        "seconds": arguments.seconds,
    }
    return Result(
        settings=settings,
        machine=load_note(),
        ample_tokens_per_s=ample.windows,
        tight_tokens_per_s=tight.windows,
        ratio=mean(tight.windows) / mean(ample.windows),
        cpu_ratio=(tight.tokens / tight.cpu_s) / (ample.tokens / ample.cpu_s),
        mean_batch={side.name: round(mean(side.batches), 1) for side in (ample, tight)},
        requests={side.name: side.served for side in (ample, tight)},
        failures=dict(ample.failures + tight.failures),
        different_outputs=sum(ample.outputs[index] != tight.outputs[index] for index in common),
        compared_outputs=len(common),
        recomputed_tokens=recomputed,
        dead=[*dead(ample.cluster), *dead(tight.cluster)],
        tight={name: stats[name] for name in COUNTERS},
        ample_swaps=dict((await ample.decode()).stats)["hackkv_swap_out_total"],
    )


def main() -> int:
    """Measure; the exit code says whether what it proves holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of load that is measured, after a warm-up")
    parser.add_argument("--codec", choices=sorted(CODECS), default="hack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="hackkv-swap-") as folder:
        model = str(write_tiny(Path(folder) / "tiny", TINY))
        result = asyncio.run(measure(arguments, model, console))
    text = json.dumps({**asdict(result), "holds": result.holds}, indent=2)
    console.print(text, markup=False)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    console.print("[green]holds[/]" if result.holds else "[red]does not hold[/]")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
