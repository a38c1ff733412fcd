"""A client leaves before its first token: how long does the next, short request wait? `python -m bench.cancel`.

A long prompt is sent to a cluster of one prefill and one decode node, and its client hangs up at a random moment while
the prompt is computed. A short request follows at once. Its time, less its time on an idle cluster, is the remaining
cost of the cancelled prompt. A pass that has begun is not broken off, so that cost should be one chunk at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.cluster import load_note, tiny_cluster
from bench.connection import Connection
from bench.sections import write_section
from bench.stages import COMPLETIONS, prompt
from measure.accuracy.machine import commit, this_machine
from prefill_node.config import CHUNK_TOKENS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, SECTION = "reliability", "bench.cancel"
LONG_TOKENS, SHORT_TOKENS = 4500, 16
CHUNKS = -(-LONG_TOKENS // CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Result:
    """Times in seconds."""

    trials: int
    idle_s: float
    """Time of a short request on an idle cluster (median)."""
    long_prefill_s: float
    """Time of the prefill of a long prompt that is not cancelled (median)."""
    waits_s: list[float]
    """Time beyond `idle_s` of each short request after a cancelled long one; sorted."""
    machine: str
    commit: str

    @property
    def last_chunk_s(self) -> float:
        """A bound on the time of the longest chunk: twice the mean, since attention grows with the tokens before it."""
        return 2 * self.long_prefill_s / CHUNKS

    @property
    def holds(self) -> bool:
        """Whether no short request waited longer than one chunk takes."""
        return self.waits_s[-1] <= self.last_chunk_s


async def _short(url: str, rng: random.Random) -> float:
    """Seconds that a short request takes, to the end of its answer."""
    async with Connection.to(url) as connection:
        await connection.ask("GET", "/live")  # opens the connection before the clock starts
        began = perf_counter()
        await _ask(connection, SHORT_TOKENS, rng)
        return perf_counter() - began


async def _ask(connection: Connection, tokens: int, rng: random.Random) -> Any:
    answer = await connection.ask("POST", COMPLETIONS, _body(tokens, rng))
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.body[:500]!r}")
    return answer.json()


def _body(tokens: int, rng: random.Random) -> bytes:
    return json.dumps({"prompt": prompt(rng, tokens), "max_tokens": 1, "return_stages": True}).encode()


async def _behind_a_cancelled_one(url: str, after_s: float, rng: random.Random) -> float:
    """Cancel a long prompt after `after_s`; return the seconds that a short request takes right after it."""
    async with Connection.to(url) as connection:
        await connection.send("POST", COMPLETIONS, _body(LONG_TOKENS, rng))
        await asyncio.sleep(after_s)
    return await _short(url, rng)


async def measure(model: Path, trials: int, seed: int, console: Console) -> Result:
    """Measure idle times, then send cancelled prompts, one after another."""
    rng = random.Random(seed)
    async with tiny_cluster(model, num_prefill=1, num_decode=1) as cluster:
        async with Connection.to(cluster.url) as connection:
            longs = [(await _ask(connection, LONG_TOKENS, rng))["hackkv"]["stages"]["prefill"] for _ in range(5)]
        idle_s = median([await _short(cluster.url, rng) for _ in range(trials)])
        waits = []
        for _ in track(range(trials), "cancelled prompts", console=console, transient=True):
            after_s = rng.uniform(0.1, 0.8) * median(longs)
            waits.append(await _behind_a_cancelled_one(cluster.url, after_s, rng) - idle_s)
    machine = this_machine("", 0)
    where = f"{machine.cpu}, {machine.system}, {load_note()}"
    return Result(trials, idle_s, median(longs), sorted(waits), where, commit())


def report(result: Result) -> str:
    """The section of docs/reliability.md."""
    half, most = result.waits_s[result.trials // 2], result.waits_s[-1]
    return f"""
| | ms |
|---|---|
| a short request ({SHORT_TOKENS} tokens) on an idle cluster, median of {result.trials} | {1e3 * result.idle_s:.0f} |
| prefill of a long prompt ({LONG_TOKENS:,} tokens, {CHUNKS} chunks) | {1e3 * result.long_prefill_s:.0f} |
| its longest chunk, at most (twice the mean: attention grows) | {1e3 * result.last_chunk_s:.0f} |
| what a short request waits longer behind a long one that was cancelled, median | {1e3 * half:.0f} |
| the same, the longest of {result.trials} | {1e3 * most:.0f} |

Machine: {result.machine}. Commit {result.commit}.
"""


def main() -> int:
    """Measure, print, write. The exit code is 0 if no short request waited longer than a chunk."""
    parser = argparse.ArgumentParser(prog="python -m bench.cancel", description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="hackkv-cancel-") as folder:
        result = asyncio.run(measure(Path(folder) / "tiny", arguments.trials, arguments.seed, console))
    console.print(report(result))
    if not arguments.dry:
        write_section(DOCS, SECTION, report(result), asdict(result), PAGE)
    console.print("[green]holds[/]" if result.holds else "[red]does not hold[/]")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
