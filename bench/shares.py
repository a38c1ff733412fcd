"""How nodes of one machine share its cores: `python -m bench.shares [MODEL] [--out docs]`.

`hackkv serve` starts two prefill and two decode nodes. Here it is started once for each way to divide the cores. The
clusters answer the same load in turn, so that a change of the machine's speed meets them alike:

- one request alone: the time to its first token, and the mean time of a token;
- six requests at once: the time until all are answered;
- a stream while others' prompts are computed: its mean time of a token.

The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Final

import httpx

from app.cluster import running
from app.serving import plan_of
from bench.cluster import load_note
from bench.sections import write_section
from hackkv.defaults import DEFAULT_CODEC
from measure.accuracy.machine import this_machine

NODES: Final = 2
"""Nodes of each role."""
PROMPT: Final = 1500
TOKENS: Final = 64
AT_ONCE: Final = 6
ROUNDS: Final = 3
TIMEOUT_S: Final = 600.0
HEAD: Final = (
    "| threads of a prefill node | of a decode node | alone: first token, s | a token, ms | six at once, s "
    "| a token beside prompts, ms |"
)


@dataclass(frozen=True, slots=True)
class Times:
    """The measurements of a round, in seconds."""

    first: float
    token: float
    six: float
    beside: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from a request to its first token, and from there to its last."""

    first: float
    rest: float


def main() -> None:
    """Print the table; with `--out`, write it into the section of performance.md."""
    parser = argparse.ArgumentParser("python -m bench.shares", description="Ways to divide the cores among nodes.")
    parser.add_argument("model", nargs="?", default="", help="as for hackkv serve; default: the shipped model")
    parser.add_argument("--out", type=Path, help="folder of performance.md, whose section is written")
    args = parser.parse_args()
    began = load_note()
    found = asyncio.run(measure(args.model))
    lines = [line(shares, rounds) for shares, rounds in found.items()]
    print(HEAD, *lines, sep="\n")
    if args.out:
        said, where = " ".join(("python -m bench.shares", *sys.argv[1:])), f"{this_machine('', 1).cpu}, {began}"
        about = f"`{said}` · {args.model or 'hackkv-small'}, codec {DEFAULT_CODEC}, {PROMPT} + {TOKENS} tokens; {where}"
        text = "\n".join(("## Cores divided among nodes", "", about, "", HEAD, "|" + "---|" * 6, *lines))
        write_section(args.out, "shares", text, {"where": where, "rows": lines})


def divisions() -> list[tuple[int, int]]:
    """Threads of a prefill and of a decode node: a node's share of the cores, or all of them."""
    cores = os.cpu_count() or 1
    share = max(1, cores // (2 * NODES))
    return [(share, share), (cores, share), (cores, cores)]


async def measure(model: str) -> dict[tuple[int, int], list[Times]]:
    """The rounds of each division."""
    clients, found = dict[tuple[int, int], httpx.AsyncClient](), dict[tuple[int, int], list[Times]]()
    async with AsyncExitStack() as stack:
        for shares in divisions():
            plan = plan_of({"path": model}, f"{DEFAULT_CODEC},allow_loss", (NODES, NODES), {"listen": {"port": 0}})
            prefill, decode = ({"model": {"threads": threads}} for threads in shares)
            plan = replace(plan, prefill=prefill, decode=decode)
            cluster = await stack.enter_async_context(running(plan, lambda _: None))
            clients[shares] = await stack.enter_async_context(
                httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S)
            )
            found[shares] = []
            await _ask(clients[shares], "warm")
        for nth in range(ROUNDS):
            for shares, client in clients.items():
                found[shares].append(await _round(client, str(nth)))
    return found


async def _round(client: httpx.AsyncClient, salt: str) -> Times:
    alone = await _ask(client, f"{salt}-alone")
    began = monotonic()
    await asyncio.gather(*(_ask(client, f"{salt}-{nth}") for nth in range(AT_ONCE)))
    six = monotonic() - began
    stream = asyncio.create_task(_ask(client, f"{salt}-stream", prompt=64, tokens=4 * TOKENS))
    while not stream.done():
        await _ask(client, f"{salt}-{monotonic()}", tokens=1)
    beside = (await stream).rest / (4 * TOKENS - 1)
    return Times(alone.first, alone.rest / (TOKENS - 1), six, beside)


async def _ask(client: httpx.AsyncClient, salt: str, prompt: int = PROMPT, tokens: int = TOKENS) -> Answer:
    """Read one stream to its end. A salt of its own keeps a request from reusing pages of another."""
    body = {"prompt": list(range(3, 3 + prompt)), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    began, times = monotonic(), list[float]()
    async with client.stream("POST", "/v1/completions", json={**body, "cache_salt": salt}) as answer:
        if answer.is_error:
            raise RuntimeError((await answer.aread()).decode())
        async for event in answer.aiter_lines():
            if event.startswith("data: {"):
                times.append(monotonic())
    return Answer(times[0] - began, times[-1] - times[0])


def line(shares: tuple[int, int], rounds: list[Times]) -> str:
    """A row of the table."""
    first, six = (median(getattr(each, name) for each in rounds) for name in ("first", "six"))
    token, beside = (1e3 * median(getattr(each, name) for each in rounds) for name in ("token", "beside"))
    return f"| {shares[0]} | {shares[1]} | {first:.2f} | {token:.1f} | {six:.1f} | {beside:.1f} |"


if __name__ == "__main__":
    main()
