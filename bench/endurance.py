"""Half an hour of clients of every kind: does any process grow?

Resident memory of every process is read every ten seconds. The first fifth is a warm-up, in which pools and caches
fill. A line is fitted to the rest by least squares. Its slope decides: a leak has a slope, and noise has none.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from statistics import linear_regression
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from app.cluster import LocalCluster
from bench.cluster import dead, memory_mib
from bench.disconnects import visit

SAMPLE_S = 10.0
WARM_UP = 0.2
MAX_SLOPE = 1.0
"""The largest slope that any process may have, in MiB a minute."""


@dataclass(frozen=True, slots=True)
class Endurance:
    """The endings of all clients, and the memory of each process over time."""

    minutes: float
    endings: Counter[str]
    at_min: list[float]
    memory: dict[str, list[float]]
    """Process -> MiB at each moment of `at_min`."""
    dead: list[str]

    def slope(self, name: str) -> float:
        """Growth in MiB a minute after the warm-up."""
        first = round(WARM_UP * len(self.at_min))
        return linear_regression(self.at_min[first:], self.memory[name][first:]).slope

    @property
    def holds(self) -> bool:
        """Whether no process died, no client hung, and no process grows."""
        healthy = not self.dead and not self.endings["hung"] and not self.endings["wrong"]
        return healthy and all(self.slope(name) < MAX_SLOPE for name in self.memory)


async def endure(cluster: LocalCluster, minutes: float, concurrency: int, seed: int, console: Console) -> Endurance:
    """Let clients come and go for `minutes`, `concurrency` at a time."""
    endings: Counter[str] = Counter()
    at_min: list[float] = []
    memory: dict[str, list[float]] = {name: [] for name in memory_mib(cluster)}
    began = perf_counter()

    async def come_and_go(rng: random.Random) -> None:
        while True:
            endings[await visit(cluster.url, rng)] += 1

    clients = [asyncio.create_task(come_and_go(random.Random(f"{seed}/{nth}"))) for nth in range(concurrency)]
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("endurance", total=60 * minutes)
        while (elapsed_s := perf_counter() - began) < 60 * minutes and not dead(cluster):
            at_min.append(elapsed_s / 60)
            for name, mib in memory_mib(cluster).items():
                memory[name].append(mib)
            progress.update(bar, completed=elapsed_s)
            await asyncio.sleep(SAMPLE_S)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return Endurance((perf_counter() - began) / 60, endings, at_min, memory, dead(cluster))


def section(result: Endurance, where: str) -> tuple[str, dict[str, Any]]:
    """The section of docs/reliability.md, and the record beside it."""
    verdict = "It holds." if result.holds else "**It does not hold.**"
    endings = ", ".join(f"{ending} {count:,}" for ending, count in result.endings.most_common())
    lines = [
        f"{result.endings.total():,} clients in {result.minutes:.0f} minutes: {endings}. {verdict}",
        "",
        "| process | after warm-up, MiB | at the end, MiB | slope, MiB/min |",
        "|---|---|---|---|",
    ]
    slopes = {name: result.slope(name) for name in result.memory}
    for name, samples in result.memory.items():
        warm = samples[round(WARM_UP * len(samples))]
        lines.append(f"| {name} | {warm:.1f} | {samples[-1]:.1f} | {slopes[name]:+.2f} |")
    record = {"where": where, "minutes": result.minutes, "endings": dict(result.endings), "slope_mib_per_min": slopes}
    return "\n".join([*lines, "", f"Machine: {where}."]), record


def report(result: Endurance, console: Console) -> None:
    """Print the endings and the growth of memory."""
    console.print(f"{result.endings.total()} clients in {result.minutes:.1f} minutes: {dict(result.endings)}")
    table = Table("process", "after warm-up, MiB", "at the end, MiB", "slope, MiB/min", title="resident memory")
    for name, samples in result.memory.items():
        warm = samples[round(WARM_UP * len(samples))]
        table.add_row(name, f"{warm:.1f}", f"{samples[-1]:.1f}", f"{result.slope(name):+.3f}")
    console.print(table)
    for name in result.dead:
        console.print(f"[red]{name} died[/]")
