"""The value of keeping KV where it is: `python -m bench.conversations`.

Three clusters of two prefill and two decode nodes serve the same conversations. The first keeps nothing. The prefill
nodes of the second keep pages. In the third, decode nodes keep pages too, and the router knows of them. Each turn goes
to one cluster after another, one request at a time, so ratios of times hold on a busy machine too. Requests with one
long system prompt follow. Each answer becomes part of the next prompt; all clusters must give the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

from app.cluster import ClusterPlan, running
from bench.cluster import load_note, metrics, total
from bench.connection import Connection
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from hackkv.model.tiny import Tiny, write_tiny
from measure.accuracy.machine import commit, this_machine

OFF: Final = "nothing"
PREFILL: Final = "prefill nodes"
BOTH: Final = "both"
CELLS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    OFF: {
        "router": {"prefix_dispatch": False},
        "prefill": {"prefix_cache": False},
        "decode": {"prefix_cache": False},
    },
    PREFILL: {"router": {"prefix_dispatch": False}, "prefill": {}, "decode": {"prefix_cache": False}},
    BOTH: {"router": {}, "prefill": {}, "decode": {}},
}
"""Which nodes keep pages -> settings of each role."""
MODEL: Final = Tiny(layers=4, hidden=256, head_dim=128, ffn=768, max_context=4608)
"""The model is large enough that computing a prompt takes longer than everything around it."""
SEED: Final = 1
BYTES: Final = "hackkv_kv_transfer_bytes_total"


@dataclass(slots=True)
class Cell:
    """One cluster and its measurements: for each round, seconds to the first token and bytes of KV."""

    url: str
    connection: Connection
    first_s: list[list[float]] = field(default_factory=list)
    kv_bytes: list[float] = field(default_factory=list)
    _bytes: float = 0.0

    async def ask(self, ids: Sequence[int], tokens: int) -> list[int]:
        """The tokens of one greedy completion. Its time to the first token is added to the present round."""
        body = {
            "prompt": list(ids),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        began, answer, first_s = perf_counter(), list[int](), 0.0
        await self.connection.send("POST", "/v1/completions", json.dumps(body).encode())
        status, headers = await self.connection.begin()
        data = b""
        async for part in self.connection.parts(headers):
            first_s = first_s or perf_counter() - began
            data += part
        if status != 200:
            raise RuntimeError(f"{status}: {data.decode()}")
        for line in data.decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    answer += choice.get("token_ids") or []
        if len(answer) != tokens:
            raise RuntimeError(f"{len(answer)} of {tokens} tokens: {data.decode()}")
        self.first_s[-1].append(first_s)
        return answer

    async def end_round(self) -> None:
        """Note the bytes of KV that moved in the round."""
        now = total(await metrics(self.url), BYTES)
        self.kv_bytes.append(now - self._bytes)
        self._bytes = now


async def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Serve everything on every cluster; returns the report."""
    async with AsyncExitStack() as stack:
        # Connections are opened after all clusters have started: an idle one would be closed meanwhile.
        urls = {name: await start(stack, options, model, settings) for name, settings in CELLS.items()}
        cells = {name: Cell(url, await stack.enter_async_context(Connection.to(url))) for name, url in urls.items()}
        rng = random.Random(SEED)
        prompts = [draw(rng, options.first_tokens) for _ in range(options.conversations)]
        for turn in range(options.turns):
            if turn:
                prompts = [(*ids, *draw(rng, options.message_tokens)) for ids in prompts]
            rng.shuffle(prompts)  # else an idle fleet, used in turn, could give a conversation the same nodes by chance
            prompts = await play(cells, prompts, options.answer_tokens)
        system = draw(rng, options.system_tokens)
        alike = [(*system, *draw(rng, options.message_tokens)) for _ in range(options.conversations)]
        await play(cells, alike[:1], options.answer_tokens)
        await play(cells, alike[1:], options.answer_tokens)
        return report(options, cells)


async def start(stack: AsyncExitStack, options: argparse.Namespace, model: str, settings: dict[str, Any]) -> str:
    """Start a cluster; return the address of its API."""
    plan = plan_of(options, model, 2, settings)
    return (await stack.enter_async_context(running(plan, lambda _: None))).url


def plan_of(options: argparse.Namespace, model: str, nodes: int, settings: dict[str, Any]) -> ClusterPlan:
    """A cluster with `nodes` nodes of each role; `settings` are those of each role."""
    worker = {
        "model": {"path": model, "dtype": "float32", "threads": 1},
        "codec": {"name": options.codec},
        "kv_bytes": options.kv_mib << 20,
    }
    router = {"listen": {"port": 0}, "control": {"port": 0}, "model": model, **settings["router"]}
    return ClusterPlan(router, worker, nodes, nodes, prefill=settings["prefill"], decode=settings["decode"])


async def play(cells: dict[str, Cell], prompts: Sequence[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    """Play one round: every prompt on every cluster, one at a time. Returns the prompts with their answers.

    Raises `RuntimeError` when two clusters answer differently.
    """
    for cell in cells.values():
        cell.first_s.append([])
    longer: list[tuple[int, ...]] = []
    for number, ids in enumerate(prompts):
        turn = number % len(cells)
        names = [*cells][turn:] + [*cells][:turn]
        answers = [await cells[name].ask(ids, tokens) for name in names]
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError(f"answers differ: {dict(zip(names, answers, strict=True))}")
        longer.append((*ids, *answers[0]))
    for cell in cells.values():
        await cell.end_round()
    return longer


def draw(rng: random.Random, count: int) -> tuple[int, ...]:
    """Random ids of the tiny vocabulary, without special tokens."""
    return tuple(rng.choices(range(3, 500), k=count))


def report(options: argparse.Namespace, cells: dict[str, Cell]) -> dict[str, Any]:
    """Medians of times, and medians of ratios taken request by request."""
    rounds = []
    names = [f"turn {turn}" for turn in range(1, options.turns + 1)]
    for index, name in enumerate([*names, "system prompt, first", "system prompt, later"]):
        off = cells[OFF].first_s[index]
        rounds.append(
            {
                "round": name,
                "first_token_ms": {key: 1e3 * statistics.median(cell.first_s[index]) for key, cell in cells.items()},
                "ratio": {
                    key: statistics.median(a / b for a, b in zip(cell.first_s[index], off, strict=True))
                    for key, cell in cells.items()
                },
                "kv_bytes": {key: cell.kv_bytes[index] / len(off) for key, cell in cells.items()},
            }
        )
    later = range(1, options.turns)
    ratios = {
        key: statistics.median(
            a / b for i in later for a, b in zip(cell.first_s[i], cells[OFF].first_s[i], strict=True)
        )
        for key, cell in cells.items()
    }
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    machine = this_machine("", 0)
    where = f"{machine.cpu}, {machine.system}, {load_note()}; commit {commit()}"
    return {"where": where, "settings": settings, "rounds": rounds, "later_turns": ratios}


def page(data: dict[str, Any]) -> str:
    """The report as text."""
    settings, later = data["settings"], data["later_turns"]
    count, turns, codec = settings["conversations"], settings["turns"], settings["codec"]
    first, message, answer, system = (settings[f"{name}_tokens"] for name in ("first", "message", "answer", "system"))
    lines = [
        "## Measured",
        "",
        f"`python -m bench.conversations` · {data['where']}",
        "",
        f"{count} conversations of {turns} turns: {first} tokens, then {message} more each time, answers of {answer}. "
        f"Then {count} requests with one system prompt of {system} tokens. Two prefill and two decode nodes, codec "
        f"`{codec}`, random FP32 model of {MODEL.layers} layers; one request at a time. All clusters gave the same "
        "tokens.",
        "",
        "Time to the first token of later turns, as a share of that of the cluster that keeps nothing (target: 0.3): "
        f"**{later[BOTH]:.2f}**, and {later[PREFILL]:.2f} where only prefill nodes keep pages.",
        "",
        "| | first token, ms: keeps nothing | prefill nodes keep | both keep | ratio | KV sent: keeps nothing "
        "| prefill nodes keep | both keep |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rounds"]:
        times, sizes = row["first_token_ms"], row["kv_bytes"]
        cells = [f"{times[key]:.0f}" for key in CELLS] + [f"{row['ratio'][BOTH]:.2f}"]
        cells += [f"{sizes[key] / 1e3:,.0f} kB" for key in CELLS]
        lines.append(f"| {row['round']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parser_of(name: str, description: str | None, *, conversations: int, turns: int) -> argparse.ArgumentParser:
    """The command line of module `name`, with the options of conversations."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--codec", default=DEFAULT_CODEC)
    parser.add_argument("--conversations", type=int, default=conversations)
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--first-tokens", type=int, default=1000, help="of a conversation's first message")
    parser.add_argument("--message-tokens", type=int, default=40, help="of every later message")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--kv-mib", type=int, default=64, help="page pool of each node, in MiB")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page; default: docs")
    return parser


def main() -> None:
    """Measure, print and write docs/conversations.md."""
    parser = parser_of("bench.conversations", __doc__, conversations=50, turns=8)
    parser.add_argument("--system-tokens", type=int, default=2000)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        data = asyncio.run(measure(options, str(write_tiny(Path(folder), MODEL))))
    text = page(data)
    print(text)
    write_section(options.out, "bench.conversations", text, data, page="conversations")


if __name__ == "__main__":
    main()
