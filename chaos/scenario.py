"""Runs a scenario and compares it with the single-process reference.

Four things must hold for every run, whatever the faults. Each request ends. A client never sees a token that the
undisturbed run would not have sent. A client whose request completes has seen all tokens. When everything is quiet,
the router and the nodes hold nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from chaos.cluster import COMPLETE, Cluster, Ending
from chaos.loop import run
from chaos.setup import Ask, Scenario, Setup
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.generate import generate
from hackkv.model.tiny import VOCAB, Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.types import Request, Role, Sampling

QUIET_S = 10.0
"""Virtual seconds from the last request's end until the router and the nodes must hold nothing."""
REAL_QUIET_S, POLL_S = 60.0, 0.05
"""On the real clock: the most seconds until they must hold nothing, and the seconds between two checks."""
PAGE_TOKENS = 32

Say = Callable[[float, str], None]
"""Takes the time of an event, in virtual seconds, and a line that describes it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a scenario."""

    endings: dict[str, Ending]
    wrong: tuple[str, ...]
    """The mistakes of the run, in words; empty if there is none."""
    seconds: float
    """Length of the run on the virtual clock."""


@cache
def tiny_worker(codec: str) -> Worker:
    """A random FP32 model of one layer: small, and batch invariant, so that tokens can be compared."""
    with TemporaryDirectory() as folder:
        tiny = Tiny(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, ffn=64, max_context=4096)
        path = write_tiny(Path(folder), tiny)
        settings: dict[str, int | float | str | bool] = {"page_tokens": PAGE_TOKENS}
        return load_worker(
            ModelConfig(path=str(path), dtype="float32", threads=1), CodecConfig(name=codec, settings=settings)
        )


def request_of(ask: Ask) -> Request:
    """The request of `ask`. Its prompt and seed depend only on the text and the length."""
    chance = random.Random(f"{ask.text or ask.name}/{ask.prompt}")
    ids = tuple(chance.randrange(3, VOCAB) for _ in range(ask.prompt))
    seed = chance.getrandbits(62)
    sampling = Sampling(seed, ask.tokens, temperature=ask.temperature, ignore_eos=True)
    return Request(ask.name, ids, sampling)


@cache
def undisturbed(codec: str, prompt_ids: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """The token ids that a single process generates."""
    return tuple(token.token_id for token in generate(tiny_worker(codec), Request("", prompt_ids, sampling)))


def play(scenario: Scenario, say: Say = lambda at_s, line: None) -> Report:
    """Run a scenario from its first second to its last."""
    return run(_play(scenario, say), scenario.faults.seed, virtual=scenario.cluster.virtual)


async def quiet(cluster: Cluster, setup: Setup) -> list[str]:
    """Give the router and the nodes time to free everything; return what they still hold, in words."""
    if setup.virtual:
        await asyncio.sleep(QUIET_S)
        return await cluster.leftovers()
    found = list[str]()
    for _ in range(round(REAL_QUIET_S / POLL_S)):
        if not (found := await cluster.leftovers()):
            break
        await asyncio.sleep(POLL_S)
    return found


async def _play(scenario: Scenario, say: Say) -> Report:
    loop = asyncio.get_running_loop()
    began = loop.time()  # a virtual clock begins at 0
    worker = tiny_worker(scenario.cluster.codec)
    cluster = Cluster(scenario.cluster, worker, scenario.faults, lambda line: say(loop.time() - began, line))
    for role, count in ((Role.PREFILL, scenario.cluster.prefill), (Role.DECODE, scenario.cluster.decode)):
        for index in range(count):
            await cluster.start(role, f"{role}-{index}")
    await asyncio.sleep(0)  # the nodes register
    asks = [asyncio.create_task(_ask(cluster, ask)) for ask in scenario.requests]
    endings = dict(zip((ask.name for ask in scenario.requests), await asyncio.gather(*asks), strict=True))
    leftovers = await quiet(cluster, scenario.cluster)
    stats = await cluster.stats()
    too_few = [f"{name} is {stats[name]:g}" for name, least in scenario.at_least.items() if stats[name] < least]
    wrong = [*_wrong(scenario, endings), *too_few, *leftovers]
    await cluster.close()
    return Report(endings, tuple(wrong), loop.time() - began)


async def _ask(cluster: Cluster, ask: Ask) -> Ending:
    await asyncio.sleep(ask.at)
    return await cluster.ask(request_of(ask))


def _wrong(scenario: Scenario, endings: dict[str, Ending]) -> list[str]:
    found = []
    for ask in scenario.requests:
        ending, expected = endings[ask.name], scenario.expect.get(ask.name, COMPLETE)
        if ending.how != expected:
            found.append(f"{ask.name}: {ending.how}, expected {expected}")
        found += mistakes(scenario.cluster.codec, ask, ending)
    failovers = sum(ending.failovers for ending in endings.values())
    if scenario.failovers not in (None, failovers):
        found.append(f"{failovers} failovers, expected {scenario.failovers}")
    return found


def mistakes(codec: str, ask: Ask, ending: Ending) -> list[str]:
    """The differences between a client's tokens and those of the undisturbed run, in words."""
    request = request_of(ask)
    right = undisturbed(codec, request.prompt_ids, request.sampling)
    seen = ending.token_ids
    if seen != right[: len(seen)]:
        first = next(i for i, (a, b) in enumerate(zip(seen, right, strict=False)) if a != b)
        return [f"{ask.name}: token {first} is wrong"]
    if ending.how == COMPLETE and seen != right:
        return [f"{ask.name}: complete after {len(seen)} tokens of {len(right)}"]
    return []
