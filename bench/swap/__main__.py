"""A decode node with a tenth of the memory that its load needs, and one with all of it: `python -m bench.swap`.

Three clusters of real processes serve the same requests, one after the other: with ample memory, with a tenth of it,
and with ample memory again, which shows whether the machine has slowed down. Each has three times as many clients as a
decode step takes sequences. Throughput is the rate of the decode node's tokens while all clients are there. Every
output of the tight node is compared with that of the ample one, which never swaps. `--seconds 600` is the long form.
Writes docs/reliability.json and its section of docs/reliability.md. The exit code is 0 if all holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from bench.cluster import load_note
from bench.swap import workload
from bench.swap.load import plan, run, windows
from bench.swap.report import Result, judge, record, save
from hackkv.codecs import CODECS
from hackkv.model.tiny import write_tiny
from measure.accuracy.machine import commit, this_machine

DOCS = Path(__file__).resolve().parents[2] / "docs"
REFERENCE_SHARE, SHORTEST_S = 0.2, 30.0
"""Each measurement of the ample cluster takes this share of the tight one's time, but at least so many seconds."""


async def measure(arguments: argparse.Namespace, model: str, console: Console) -> Result:
    """Measure with ample memory, with a tenth of it, and with ample memory again."""
    work, codec = workload.jobs(arguments.seed), arguments.codec
    memory = {"ample": workload.ample(work, codec), "tight": workload.tight(work, codec)}
    reference_s = max(SHORTEST_S, REFERENCE_SHARE * arguments.seconds)
    phases = (("ample", reference_s), ("tight", arguments.seconds), ("ample", reference_s))
    runs = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True) as progress:
        for name, seconds in phases:
            bar = progress.add_task(name, total=windows(seconds))
            advance = partial(progress.advance, bar)
            runs.append(await run(plan(model, codec, memory[name]), work, seconds, advance))
    machine = this_machine("", 0)
    where = (f"{machine.cpu}, {machine.system}, {load_note()}", commit())
    return judge(runs[0], runs[1], runs[2], memory, codec, arguments.seconds, where)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.swap", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of load that is measured, after a warm-up")
    parser.add_argument("--codec", choices=sorted(CODECS), default="hack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="hackkv-swap-") as folder:
        model = str(write_tiny(Path(folder) / "tiny", workload.MODEL))
        result = asyncio.run(measure(arguments, model, console))
    console.print(json.dumps(record(result), indent=1), markup=False)
    if not arguments.dry:
        save(result, DOCS)
    console.print("[green]holds[/]" if result.holds else "[red]does not hold[/]")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
