"""Kill and restart nodes of a real cluster under a steady load: `python -m bench.reliability kill-decode|...|all`.

An undisturbed run of the same requests on two prefill and two decode nodes gives the tokens that every client must get.
Writes docs/reliability.json and the table in docs/reliability.md. The exit code is 0 if all scenarios hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from rich.console import Console
from rich.progress import Progress

from app.cluster import LocalCluster
from bench.cluster import metrics, tiny_cluster
from bench.reliability.load import Outcome, bodies, steady
from bench.reliability.report import Result, judge, save
from bench.reliability.scenarios import SCENARIOS, Scenario
from measure.accuracy.machine import commit, this_machine

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEED = 5


async def _run(
    cluster: LocalCluster, requests: list[bytes], rate: float, scenario: Scenario | None, console: Console
) -> tuple[list[Outcome], float]:
    """Send all requests, and disturb the cluster in the middle. Returns the outcomes and the disturbance's time."""
    middle_s, began = len(requests) / rate / 2, perf_counter()
    at_s = 0.0

    async def disturb(scenario: Scenario) -> None:
        nonlocal at_s
        await asyncio.sleep(middle_s)
        at_s = perf_counter() - began
        await scenario.disturb(cluster)

    name = scenario.name if scenario else "calm"
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(name, total=len(requests))
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(steady(cluster.url, requests, rate, lambda: progress.advance(bar)))
            if scenario is not None:
                tasks.create_task(disturb(scenario))
    return load.result(), at_s


async def measure(
    names: Sequence[str], count: int, rate: float, model: Path, console: Console
) -> AsyncIterator[Result]:
    """Run without disturbance, then each scenario on a cluster of its own."""
    requests = bodies(count, SEED)
    async with tiny_cluster(model) as cluster:
        calm, _ = await _run(cluster, requests, rate, None, console)
    if broken := [outcome.error for outcome in calm if outcome.error]:
        raise SystemExit(f"the undisturbed run failed: {broken[0]}")
    machine = this_machine("", 0)
    for name in names:
        scenario = SCENARIOS[name]
        async with tiny_cluster(model, num_prefill=scenario.num_prefill, num_decode=scenario.num_decode) as cluster:
            outcomes, at_s = await _run(cluster, requests, rate, scenario, console)
            after = await metrics(cluster.url)
        where = f"{machine.cpu}, {machine.system}, {machine.cores} cores", os.getloadavg()[0], commit()
        result = judge(scenario, calm, outcomes, rate, at_s, after, where)
        verdict = "[green]holds[/]" if result.holds else "[red]does not hold[/]"
        console.print(f"{name}: {result.succeeded}/{count} served, {result.tokens_differ} differ; {verdict}")
        for error, times in result.errors.items():
            console.print(f"  {times} x {error}", markup=False)
        yield result


async def _main(arguments: argparse.Namespace, model: Path) -> int:
    names = tuple(SCENARIOS) if arguments.scenario == "all" else (arguments.scenario,)
    holds = True
    async for result in measure(names, arguments.requests, arguments.rate, model, Console(highlight=False)):
        holds &= result.holds
        if not arguments.dry:
            save(result, DOCS)
    return 0 if holds else 1


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.reliability", description=__doc__)
    parser.add_argument("scenario", choices=(*SCENARIOS, "all"))
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="hackkv-reliability-") as folder:
        return asyncio.run(_main(arguments, Path(folder) / "tiny"))


if __name__ == "__main__":
    sys.exit(main())
