"""A long scenario: thousands of requests while clients leave, frames are damaged, and nodes die, join and leave.

The churn is that of published tests: 248 joins and 149 leaves in 12 minutes. Every request must end in time without a
wrong token. When the storm is over, router and nodes must hold nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from chaos.cluster import ABORTED, Cluster
from chaos.loop import run
from chaos.scenario import mistakes, quiet, request_of, tiny_worker
from chaos.setup import Ask, Setup
from faults.plan import AT_LINKS, Action, FaultPlan, FaultRule, Point
from hackkv.types import Role

PROMPTS = (1, 31, 32, 33, 64, 97, 200, 320)
"""Prompt lengths around multiples of the page of 32 tokens, where mistakes are likely."""
ANSWERS = (1, 2, 5, 12, 33)
TEXTS = 4
"""Different prompts of each length. The number is small, so that prefixes are shared."""
WHERE_CLIENTS_LEAVE = [point for point in Point if point not in AT_LINKS]
CORE = 2
"""Nodes of each role that never leave, so that the fleet is never empty for long. Faults may kill them."""


@dataclass(frozen=True, slots=True)
class Storm:
    """The size of a storm."""

    requests: int = 10_000
    minutes: float = 12.0
    joins: int = 248
    leaves: int = 149
    abort_share: float = 0.2
    wire: str = "inproc"
    seed: int = 0


@dataclass(slots=True)
class Damage:
    """The result of a storm."""

    storm: Storm
    endings: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)
    """Number of clients that left, by the point at which they left."""
    strikes: Counter[str] = field(default_factory=Counter)
    joins: int = 0
    leaves: int = 0
    failovers: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    virtual_s: float = 0.0

    def summary(self) -> dict[str, object]:
        """All fields, as values for JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"storm": asdict(self.storm)}


def rules() -> tuple[FaultRule, ...]:
    """The fault rules of a storm. A client's name says at which point it leaves."""
    leaving = [FaultRule(at=point, do=Action.ABORT, request=f"*@{point}", times=0) for point in WHERE_CLIENTS_LEAVE]
    rotten = [
        FaultRule(at=Point.FRAME, do=action, chance=0.002, times=0)
        for action in (Action.DROP, Action.CORRUPT, Action.DUPLICATE, Action.CUT)
    ]
    cut = [
        FaultRule(at=point, do=Action.CUT, chance=0.001, times=0)
        for point in (Point.PREFILL_JOB, Point.ASSIGN, Point.HANDOFF, Point.RECEIPT, Point.LANDED, Point.TOKEN)
    ]
    dying = [
        FaultRule(at=point, do=Action.KILL, chance=0.0005, seconds=4, times=0)
        for point in (Point.FIRST_TOKEN, Point.FRAME, Point.END, Point.RESERVED, Point.LANDED, Point.TOKEN)
    ]
    slow = [
        FaultRule(at=Point.FRAME, do=Action.DELAY, seconds=0.5, chance=0.01, times=0),
        FaultRule(at=Point.REPORT, do=Action.STALL, chance=0.002, times=0),
        FaultRule(at=Point.RESERVED, do=Action.FILL, seconds=2, chance=0.01, times=0),
    ]
    # These rules strike only on wires with links: peers die and links break before, during and after a parcel.
    at_links = [
        FaultRule(at=point, do=action, chance=chance, seconds=seconds, times=0)
        for point in AT_LINKS
        for action, chance, seconds in ((Action.CUT, 0.01, 0), (Action.KILL, 0.005, 4), (Action.DELAY, 0.01, 0.5))
    ]
    at_links.append(FaultRule(at=Point.SEND, do=Action.CORRUPT, chance=0.01, times=0))
    return (*leaving, *rotten, *cut, *dying, *slow, *at_links)


def weather(storm: Storm, on_progress: Callable[[int], None] = lambda ended: None) -> Damage:
    """Run a storm to its end."""
    setup = Setup(prefill_pages=48, decode_pages=48, wire=storm.wire)
    return run(_weather(storm, setup, on_progress), storm.seed, virtual=setup.virtual)


async def _weather(storm: Storm, setup: Setup, on_progress: Callable[[int], None]) -> Damage:
    loop, chance, damage = asyncio.get_running_loop(), random.Random(storm.seed), Damage(storm)
    began = loop.time()

    def hear(line: str) -> None:
        rest = line.partition(": ")[2]
        if " at " in rest:
            damage.strikes[rest.split(" of ")[0]] += 1

    cluster = Cluster(setup, tiny_worker(setup.codec), FaultPlan(seed=storm.seed, rules=rules()), hear)
    for role in Role:
        for index in range(CORE):
            await cluster.start(role, f"{role}-{index}")
    churn = asyncio.create_task(_churn(cluster, storm, chance, damage))
    asks = []
    for number in range(storm.requests):
        asks.append(asyncio.create_task(_ask(cluster, _draw(chance, number, storm), damage, on_progress)))
        await asyncio.sleep(chance.expovariate(storm.requests / (60 * storm.minutes)))
    await asyncio.gather(*asks)
    await churn
    damage.wrong += await quiet(cluster, setup)
    await cluster.close()
    damage.virtual_s = loop.time() - began
    return damage


def _draw(chance: random.Random, number: int, storm: Storm) -> Ask:
    leaves = f"@{chance.choice(WHERE_CLIENTS_LEAVE)}" if chance.random() < storm.abort_share else ""
    return Ask(
        name=f"{number}{leaves}",
        text=str(number % TEXTS),
        prompt=chance.choice(PROMPTS),
        tokens=chance.choice(ANSWERS),
        temperature=chance.choice((0.0, 1.0)),
    )


async def _ask(cluster: Cluster, ask: Ask, damage: Damage, on_progress: Callable[[int], None]) -> None:
    began = asyncio.get_running_loop().time()
    ending = await cluster.ask(request_of(ask))
    damage.endings[ending.how] += 1
    if ending.how == ABORTED:
        damage.aborts[ask.name.partition("@")[2]] += 1
    damage.failovers += ending.failovers
    damage.slowest_s = max(damage.slowest_s, ending.at_s - began)
    damage.wrong += mistakes(cluster.codec, ask, ending)
    on_progress(damage.endings.total())


async def _churn(cluster: Cluster, storm: Storm, chance: random.Random, damage: Damage) -> None:
    """Let nodes join and leave in random order, at equal intervals. They leave without notice."""
    moves = ["join"] * storm.joins + ["leave"] * storm.leaves
    chance.shuffle(moves)
    visitors: list[str] = []
    for number, move in enumerate(moves):
        await asyncio.sleep(60 * storm.minutes / len(moves))
        if move == "join":
            role = chance.choice(list(Role))
            visitors.append(f"visitor-{number}")
            await cluster.start(role, visitors[-1])
            damage.joins += 1
        elif visitors:
            cluster.kill(visitors.pop(chance.randrange(len(visitors))), back_after_s=0)
            damage.leaves += 1
