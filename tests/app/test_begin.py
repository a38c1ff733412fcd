"""A cluster waits for its nodes as long as one of them keeps reporting. The clock of these tests jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.cluster import START_S, ClusterPlan, LocalCluster, NodeProcess
from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import NodeLost
from tests.app.saying import Saying

WORDS = ({"say": "compiling"}, {"say": "half of it is done"}, {"ready": {"address": "here"}})


async def begun(folder: Path, *pauses: Sequence[float]) -> tuple[list[Saying], list[str], str, float]:
    """Start a node for each of `pauses`. Returns the processes, what the operator saw, the error, and the seconds."""
    processes, said = [Saying(WORDS, each) for each in pauses], list[str]()
    cluster = LocalCluster(ClusterPlan({}, {}), folder, said.append)
    loop, error = asyncio.get_running_loop(), ""
    began = loop.time()
    nodes = [NodeProcess(f"node-{i}", "decode", each) for i, each in enumerate(processes)]  # type: ignore[arg-type]
    try:
        await cluster._begin(START_S, *nodes)
    except NodeLost as lost:
        error = str(lost)
    return processes, said, error, loop.time() - began


def test_nodes_that_go_on_saying_something_may_take_any_time(tmp_path: Path) -> None:
    """The second node is silent for longer, while the first one compiles what both need."""
    long = START_S - 1
    processes, said, error, took = on_a_virtual_clock(begun(tmp_path, [long] * 3, [1, 3 * long, 1]))
    assert not error
    assert took == pytest.approx(3 * long + 2)
    assert not any(process.ended for process in processes)
    assert said[:2] == ["node-1: compiling", "node-0: compiling"]
    assert said[-1] == "node-1 ready at here"


def test_nodes_that_fall_silent_are_named_and_ended(tmp_path: Path) -> None:
    processes, _, error, took = on_a_virtual_clock(begun(tmp_path, [1, 2, 3], [1, 3 * START_S, 1], [3 * START_S, 1, 1]))
    assert error == "node-1, node-2 not ready in time"
    assert took == pytest.approx(6 + START_S)
    assert [process.ended for process in processes] == [False, True, True]


def test_a_cluster_without_nodes_waits_for_nobody(tmp_path: Path) -> None:
    assert on_a_virtual_clock(begun(tmp_path)) == ([], [], "", 0.0)
