"""Soak tests on a cluster of real processes: `python -m bench.soak stages|disconnects|endurance`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench import disconnects, endurance, stages
from bench.cluster import load_note, tiny_cluster
from bench.sections import write_section
from measure.accuracy.machine import commit, this_machine

DOCS = Path(__file__).resolve().parents[1] / "docs"


async def _stages(arguments: argparse.Namespace, model: Path, console: Console) -> bool:
    async with tiny_cluster(model, arguments.codec) as cluster:
        result = await stages.measure(cluster, arguments.requests, arguments.concurrency, arguments.seed, console)
    stages.report(result, console)
    return stages.share_within(result) >= stages.WANTED_SHARE


async def _disconnects(arguments: argparse.Namespace, model: Path, console: Console) -> bool:
    async with tiny_cluster(model, arguments.codec) as cluster:
        result = await disconnects.storm(cluster, arguments.requests, arguments.concurrency, arguments.seed, console)
    disconnects.report(result, console)
    return result.holds


async def _endurance(arguments: argparse.Namespace, model: Path, console: Console) -> bool:
    async with tiny_cluster(model, arguments.codec) as cluster:
        result = await endurance.endure(cluster, arguments.minutes, arguments.concurrency, arguments.seed, console)
    endurance.report(result, console)
    if not arguments.dry:
        machine = this_machine("", 0)
        where = f"{machine.cpu}, {machine.system}, {load_note()}; commit {commit()}"
        write_section(DOCS, "bench.soak", *endurance.section(result, where), "reliability")
    return result.holds


DEFAULTS = {"stages": (500, 8, _stages), "disconnects": (1000, 16, _disconnects), "endurance": (0, 8, _endurance)}
"""Name of the soak -> requests, concurrency, and the function that runs it."""


def main() -> int:
    """Run one soak. The exit code is 0 if its result holds."""
    parser = argparse.ArgumentParser("python -m bench.soak", description=__doc__)
    parser.add_argument("what", choices=tuple(DEFAULTS))
    parser.add_argument("--requests", type=int, default=0, help="default: 500 for stages, 1000 for disconnects")
    parser.add_argument("--concurrency", type=int, default=0, help="default: 16 for disconnects, 8 for the others")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of endurance (default %(default)g)")
    parser.add_argument("--dry", action="store_true", help="endurance: do not write docs/reliability.md")
    parser.add_argument("--codec", default="hack")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    requests, concurrency, run = DEFAULTS[arguments.what]
    arguments.requests = arguments.requests or requests
    arguments.concurrency = arguments.concurrency or concurrency
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="hackkv-soak-") as folder:
        holds = asyncio.run(run(arguments, Path(folder) / "tiny", console))
    console.print(load_note())
    console.print("[green]holds[/]" if holds else "[red]does not hold[/]")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
