"""Disturbances of a cluster in the middle of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.cluster import LocalCluster

AWAY_S = 3.0
"""Seconds until a node that was killed without a spare is started again."""
DRAINED_S = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, a disturbance, and what a peer published for the same disturbance."""

    name: str
    what: str
    num_prefill: int
    num_decode: int
    disturb: Callable[[LocalCluster], Awaitable[None]]
    wanted_share: float
    published: str


def _kill(cluster: LocalCluster, name: str) -> None:
    next(child for child in cluster.children if child.name == name).process.kill()


async def _kill_decode(cluster: LocalCluster) -> None:
    _kill(cluster, "decode-0")


async def _kill_prefill(cluster: LocalCluster) -> None:
    _kill(cluster, "prefill-0")


async def _no_spare(cluster: LocalCluster) -> None:
    for name in ("decode-0", "prefill-0"):
        _kill(cluster, name)
        await asyncio.sleep(AWAY_S)
        await cluster.restart(name)


async def _rolling(cluster: LocalCluster) -> None:
    """Send SIGTERM and start a new process under the old name, one node after another."""
    for node in cluster.children[1:]:
        node.process.terminate()
        async with asyncio.timeout(DRAINED_S):
            await node.process.wait()
        await cluster.restart(node.name)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "kill-decode", "SIGKILL of one decode node of two", 2, 2, _kill_decode, 0.995,
            "Dynamo: 200/800, never recovers",
        ),
        Scenario(
            "kill-prefill", "SIGKILL of one prefill node of two", 2, 2, _kill_prefill, 0.995,
            "Dynamo: 798/800, recovery 42.31 s",
        ),
        Scenario(
            "no-spare", "SIGKILL of the only decode node, then of the only prefill node, each started again", 1, 1,
            _no_spare, 1.0, "Dynamo, aggregated: 520/800",
        ),
        Scenario(
            "rolling", "SIGTERM and restart of every node, one after another", 2, 2, _rolling, 1.0, "none found",
        ),
    )
}  # fmt: skip
