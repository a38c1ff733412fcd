"""Hostile input against live processes: `python -m bench.fuzz --count 100000`.

Two in five cases are KV frames through decoder and ledger, one in fifty is a push into a live decode node, and the rest
are HTTP bodies to a live router. Every case must end in a named error; no process may die or grow without bound.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from app.cluster import LocalCluster
from bench import fuzz_frames, fuzz_http
from bench.cluster import channels_into, dead, load_note, memory_mib, tiny_cluster

FRAME_SHARE, LIVE_SHARE = 0.4, 0.02
CONCURRENCY = 8
WARM_UP = 500
MAX_GROWTH_MIB = 64.0
CODEC = "hack"


@dataclass(frozen=True, slots=True)
class Result:
    """The endings of all cases, and the state of the processes after them."""

    frames: Counter[str]
    pushes: Counter[str]
    bodies: Counter[str]
    before_mib: dict[str, float]
    after_mib: dict[str, float]
    dead: list[str]

    @property
    def holds(self) -> bool:
        """Whether all errors were named, no process died, and memory is bounded."""
        unnamed = any("internal" in name for endings in (self.frames, self.pushes, self.bodies) for name in endings)
        grown = max((self.after_mib[name] - self.before_mib[name] for name in self.after_mib), default=0.0)
        return not unnamed and not self.dead and grown <= MAX_GROWTH_MIB


async def attack(cluster: LocalCluster, folder: Path, count: int, seed: int, console: Console) -> Result:
    """Spread `count` cases over the three ways in; `folder` is the cluster's checkpoint."""
    worker = fuzz_frames.tiny_worker(folder, CODEC)
    frames, pushes = round(count * FRAME_SHARE), round(count * LIVE_SHARE)
    bodies = count - frames - pushes
    address = next(child.ready["address"] for child in cluster.children if child.name.startswith("decode"))
    async with channels_into(cluster) as channels:
        node = fuzz_frames.LiveDecodeNode(address, worker, channels)
        # Caches, thread pools and allocator arenas fill up on the first requests; that is not growth.
        await fuzz_http.attack_http(cluster.url, WARM_UP, CONCURRENCY, seed + 1000, lambda _: None)
        await fuzz_frames.attack_live(node, WARM_UP // 10, CONCURRENCY, seed + 1000, lambda _: None)
        fuzz_frames.attack_in_process(worker, WARM_UP, seed + 1000, lambda _: None)
        before = _memory(cluster)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("HTTP bodies", total=bodies)
            by_body = await fuzz_http.attack_http(
                cluster.url, bodies, CONCURRENCY, seed, lambda done: progress.advance(bar, done)
            )
            bar = progress.add_task("pushes into a live decode node", total=pushes)
            by_push = await fuzz_frames.attack_live(
                node, pushes, CONCURRENCY, seed, lambda done: progress.advance(bar, done)
            )
            bar = progress.add_task("frames through decoder and ledger", total=frames)
            by_frame = fuzz_frames.attack_in_process(worker, frames, seed, lambda done: progress.advance(bar, done))
    return Result(by_frame, by_push, by_body, before, _memory(cluster), dead(cluster))


def report(result: Result, console: Console) -> None:
    """Print the endings of each way in, and the memory."""
    ways = (("frames, in process", result.frames), ("pushes, live", result.pushes), ("HTTP bodies", result.bodies))
    for title, endings in ways:
        table = Table("ending", "cases", title=f"{title}: {endings.total():,}")
        for name, count in endings.most_common():
            table.add_row(name, f"{count:,}")
        console.print(table)
    memory = Table("process", "before, MiB", "after, MiB", title="resident memory")
    for name, after in result.after_mib.items():
        memory.add_row(name, f"{result.before_mib[name]:.0f}", f"{after:.0f}")
    console.print(memory)
    for name in result.dead:
        console.print(f"[red]{name} died[/]")


def _memory(cluster: LocalCluster) -> dict[str, float]:
    return memory_mib(cluster) | {"this process": psutil.Process().memory_info().rss / 2**20}


async def _run(count: int, seed: int, console: Console) -> bool:
    with TemporaryDirectory(prefix="hackkv-fuzz-") as folder:
        model, limit = Path(folder) / "tiny", fuzz_http.MAX_BODY_BYTES
        async with tiny_cluster(model, CODEC, num_prefill=1, num_decode=1, max_body_bytes=limit) as cluster:
            result = await attack(cluster, model, count, seed, console)
    report(result, console)
    return result.holds


def main() -> int:
    """Fuzz; the exit code says whether every case ended in a named error."""
    parser = argparse.ArgumentParser("python -m bench.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="cases; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    holds = asyncio.run(_run(arguments.count, arguments.seed, console))
    console.print(load_note())
    console.print("[green]holds[/]" if holds else "[red]does not hold[/]")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
