"""Requests that are cancelled or stay in one state for too long leave nothing behind, and their time is told."""

from __future__ import annotations

import asyncio

import pytest

from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import DeadlineExceeded
from hackkv.timing import Stage
from hackkv.types import Role
from router.config import DeadlinesConfig
from tests.router.runs import Run
from tests.router.scripted import Cluster, Point, info


@pytest.mark.parametrize("point", list(Point))
async def test_cancelling_anywhere_leaves_nothing(cluster: Cluster, point: Point) -> None:
    cluster.gate(point)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[point].wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    cluster.assert_idle()
    assert run.dispatcher.inflight == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    run.assert_whole()


@pytest.mark.parametrize("steps", range(40))
async def test_cancelling_after_any_number_of_steps_leaves_nothing(cluster: Cluster, steps: int) -> None:
    cluster.overload("d0", "d1")
    serving = asyncio.create_task(Run(cluster).serve())
    for _ in range(steps):
        await asyncio.sleep(0)
        if steps == 5:
            await cluster.fleet.nodes.register(info(Role.DECODE, "d1"))
    serving.cancel()
    await asyncio.wait([serving])
    await cluster.fleet.nodes.register(info(Role.DECODE, "d0"))
    cluster.assert_idle()
    assert asyncio.all_tasks() == {asyncio.current_task()}


STATES = [
    (Point.PREFILL, "prefill_s", Stage.PREFILL),
    (Point.RESERVE, "queue_s", Stage.ROUTER_QUEUE),
    (Point.HANDOFF, "transfer_s", Stage.TRANSFER),
    (Point.LANDED, "transfer_s", Stage.TRANSFER),
    (Point.TOKEN, "token_s", Stage.DECODE),
]


@pytest.mark.parametrize(("point", "deadline", "stage"), STATES)
@pytest.mark.parametrize("in_all", [False, True])
def test_every_state_has_a_deadline_and_owns_the_time_spent_in_it(
    point: Point, deadline: str, stage: Stage, in_all: bool
) -> None:
    """On a clock that jumps: nothing but waiting takes time."""

    async def serve() -> None:
        cluster = await Cluster().join()
        cluster.gate(point)
        deadlines = DeadlinesConfig(**{"total_s" if in_all else deadline: 5.0})
        run = Run(cluster, deadlines=deadlines, max_failovers=0)
        with pytest.raises(DeadlineExceeded):
            await run.serve()
        cluster.assert_idle()
        assert run.stages() == {stage: pytest.approx(5.0, abs=0.1)}  # a transfer has more for each token

    on_a_virtual_clock(serve())


def test_waiting_for_room_has_a_deadline() -> None:
    """On a clock that jumps: nothing but waiting takes time."""

    async def serve() -> None:
        cluster = await Cluster(decode=1, pages=2).join()
        assert cluster.fleet.decode.try_book(cluster.demand(32))
        run = Run(cluster, deadlines=DeadlinesConfig(queue_s=5.0))
        with pytest.raises(DeadlineExceeded, match="waiting for room"):
            await run.serve()
        assert run.stages() == {Stage.SWAP_WAIT: pytest.approx(5.0)}

    on_a_virtual_clock(serve())
