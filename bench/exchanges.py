"""The value of letting a prefill node fetch a conversation from its decode node: `python -m bench.exchanges`.

Three clusters of one prefill and one decode node serve the same conversations. In two of them the prefill node is
killed before every later turn, and another one with no pages takes its place. In one of these clusters it computes
every prompt from the beginning, in the other it may fetch. In the third cluster the prefill node stays. Every prompt
goes to each cluster, one request at a time, so ratios of times hold on a busy machine too. All clusters must give the
same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from app.cluster import LocalCluster, running
from bench.cluster import load_note, metrics, total
from bench.connection import Connection
from bench.conversations import MODEL, SEED, Cell, draw, parser_of, plan_of, play
from bench.sections import write_section
from hackkv.model.tiny import write_tiny
from measure.accuracy.machine import commit, this_machine

STAYS: Final = "stays"
COMPUTES: Final = "computes"
FETCHES: Final = "may fetch"
PREFILL: Final = {STAYS: "auto", COMPUTES: "never", FETCHES: "auto"}
"""Cluster -> `prefix_fetch` of its prefill nodes."""
COUNTED: Final = {"fetched_tokens": "hackkv_kv_fetched_tokens_total", "fetched_bytes": "hackkv_kv_fetched_bytes_total"}
WARM_TOKENS: Final = 512
"""Tokens of a prompt that a new prefill node computes before it is measured."""


async def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Serve everything on every cluster; returns the report."""
    async with AsyncExitStack() as stack:
        clusters = {}
        for name, fetch in PREFILL.items():
            plan = plan_of(options, model, 1, {"router": {}, "prefill": {"prefix_fetch": fetch}, "decode": {}})
            clusters[name] = await stack.enter_async_context(running(plan, lambda _: None))
        cells = {
            name: Cell(cluster.url, await stack.enter_async_context(Connection.to(cluster.url)))
            for name, cluster in clusters.items()
        }
        rng = random.Random(SEED)
        prompts = [draw(rng, options.first_tokens) for _ in range(options.conversations)]
        turns = []
        for turn in range(options.turns):
            if turn:
                prompts = [(*ids, *draw(rng, options.message_tokens)) for ids in prompts]
                for name in (COMPUTES, FETCHES):
                    await exchange(clusters[name])
            await play(cells, [draw(rng, WARM_TOKENS)], 2)
            before = await metrics(cells[FETCHES].url)
            prompts = await play(cells, prompts, options.answer_tokens)
            after = await metrics(cells[FETCHES].url)
            turns.append(
                {
                    "turn": turn + 1,
                    **{key: total(after, name) - total(before, name) for key, name in COUNTED.items()},
                    "first_s": {name: cell.first_s[-1] for name, cell in cells.items()},
                }
            )
        return report(options, turns)


async def exchange(cluster: LocalCluster) -> None:
    """Kill the prefill node and start another one."""
    (node,) = (child for child in cluster.children if child.role == "prefill")
    node.process.kill()
    await node.process.wait()
    await cluster.restart(node.name)


def report(options: argparse.Namespace, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of times, and medians of ratios taken request by request."""
    rounds = []
    for turn in turns:
        first = turn["first_s"]
        rounds.append(
            {
                **{key: value / options.conversations for key, value in turn.items() if key in COUNTED},
                "turn": turn["turn"],
                "first_token_ms": {name: 1e3 * statistics.median(times) for name, times in first.items()},
                "ratio": statistics.median(a / b for a, b in zip(first[FETCHES], first[COMPUTES], strict=True)),
            }
        )
    machine = this_machine("", 0)
    where = f"{machine.cpu}, {machine.system}, {load_note()}; commit {commit()}"
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return {"where": where, "settings": settings, "rounds": rounds}


def page(data: dict[str, Any]) -> str:
    """The report as text."""
    settings = data["settings"]
    first, message, answer = (settings[f"{name}_tokens"] for name in ("first", "message", "answer"))
    lines = [
        f"## Another prefill node for every turn, `{settings['codec']}`",
        "",
        f"`python -m bench.exchanges --codec {settings['codec']}` · {data['where']}",
        "",
        f"{settings['conversations']} conversations: {first} tokens, then {message} more each time, answers of "
        f"{answer}. One prefill and one decode node, codec `{settings['codec']}`, random FP32 model of "
        f"{MODEL.layers} layers; one request at a time. Before every later turn the prefill node is killed, and "
        "another one takes its place that computes everything (`prefix_fetch: never`) or may fetch (`auto`). All "
        "clusters gave the same tokens.",
        "",
        "| | first token, ms: prefill node stays | another one computes | may fetch | ratio | tokens fetched "
        "| KV fetched |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rounds"]:
        times = " | ".join(f"{row['first_token_ms'][name]:.0f}" for name in PREFILL)
        fetched = f"{row['fetched_tokens']:,.0f} | {row['fetched_bytes'] / 1e3:,.0f} kB"
        lines.append(f"| turn {row['turn']} | {times} | {row['ratio']:.2f} | {fetched} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write docs/conversations.md."""
    options = parser_of("bench.exchanges", __doc__, conversations=20, turns=4).parse_args()
    with TemporaryDirectory() as folder:
        data = asyncio.run(measure(options, str(write_tiny(Path(folder), MODEL))))
    text = page(data)
    print(text)
    write_section(options.out, f"bench.exchanges {options.codec}", text, data, page="conversations")


if __name__ == "__main__":
    main()
