"""Nodes die, drain, stall or are all away. The client's stream goes on: no token is lost, and none is repeated."""

from __future__ import annotations

import asyncio

import pytest

from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import (
    DeadlineExceeded,
    FrameRefused,
    HackkvError,
    NodeDraining,
    NodeLost,
    Overloaded,
    TransferError,
    Unavailable,
)
from hackkv.held import HeldKv
from hackkv.timing import Stage
from hackkv.types import DecodeJob, HandoffFailed, PrefillEvent, PrefillJob, Role
from router.config import DeadlinesConfig
from router.life.states import RequestState
from router.watch.metrics import Outcome
from tests.router.runs import Run, assert_served, counted, until
from tests.router.scripted import Cluster, Point, count_up


def decode_jobs(cluster: Cluster) -> list[DecodeJob]:
    """Every job of every decode node, by epoch."""
    return sorted((job for node in cluster.decode.values() for job in node.jobs), key=lambda job: job.epoch)


def prompts(cluster: Cluster) -> int:
    """How often a prompt was computed."""
    return sum(len(node.jobs) for node in cluster.prefill.values())


async def test_a_dead_decode_node_is_replaced_from_the_kept_kv(cluster: Cluster) -> None:
    cluster.script.fail_at_token = 4
    cluster.fail("d0", Point.TOKEN)
    run = Run(cluster, max_tokens=8)
    await run.serve()
    assert_served(run, cluster)
    assert prompts(cluster) == 1
    first, second = decode_jobs(cluster)
    assert (first.transfer_id, first.epoch, first.emitted) == (second.transfer_id, 0, ())
    assert (second.epoch, list(second.emitted)) == (1, count_up(run.flight.request)[:4])
    assert len(run.flight.route.receipts) == 2
    run.metrics.ended(run.flight, Outcome.LENGTH)
    assert counted(run, "hackkv_failovers") == {'{cause="lost",kind="reassigned"}': 1}
    assert counted(run, "hackkv_replayed_tokens") == {"": 3}


async def test_when_the_kv_had_to_go_the_prompt_is_prefilled_again(cluster: Cluster) -> None:
    cluster.script.keeps_kv = False
    cluster.script.fail_at_token = 4
    cluster.fail("d0", Point.TOKEN)
    run = Run(cluster, max_tokens=8)
    await run.serve()
    assert_served(run, cluster)
    assert prompts(cluster) == 2
    first, second = decode_jobs(cluster)
    assert first.transfer_id != second.transfer_id
    assert list(second.emitted) == count_up(run.flight.request)[:4]
    assert counted(run, "hackkv_failovers") == {'{cause="lost",kind="prefilled"}': 1}


@pytest.mark.parametrize("point", [Point.RESERVE, Point.LANDED, Point.TOKEN])
async def test_draining_decode_nodes_are_left_without_blame(cluster: Cluster, point: Point) -> None:
    cluster.fail("d0", point, NodeDraining("d0 is about to stop"))
    run = Run(cluster, max_failovers=0)
    await run.serve()
    assert_served(run, cluster)
    assert prompts(cluster) == 1
    node = next(member for member in cluster.fleet.nodes.members(Role.DECODE) if member.node_id == "d0")
    assert node.draining
    assert node.health.suspended_until == 0
    await cluster.report("d0")  # this report does not count: the node's process is about to stop
    assert [(await cluster.fleet.decode.book(cluster.demand(16))).member.node_id for _ in range(3)] == ["d1"] * 3
    await cluster.report("d0", incarnation="2")
    assert (await cluster.fleet.decode.book(cluster.demand(16))).member.node_id == "d0"


async def test_a_draining_prefill_node_is_left_before_token_0(cluster: Cluster) -> None:
    cluster.fail("p0", Point.PREFILL, NodeDraining("p0 is about to stop"))
    run = Run(cluster, max_failovers=0)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.route.prefill_node == "p1"
    assert counted(run, "hackkv_failovers") == {'{cause="draining",kind="redispatched"}': 1}


async def test_a_node_that_said_it_drains_and_vanishes_is_not_blamed_either(cluster: Cluster) -> None:
    gate = cluster.gate(Point.TOKEN)
    cluster.fail("d0", Point.TOKEN, NodeLost("connection reset"))
    run = Run(cluster, max_failovers=0)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    await cluster.report("d0", draining=True)
    gate.set()
    await serving
    assert_served(run, cluster)


async def test_while_all_nodes_of_a_role_drain_requests_wait_for_a_new_one(cluster: Cluster) -> None:
    for node_id in cluster.decode:
        await cluster.report(node_id, draining=True)
    assert cluster.fleet.nodes.missing == (Role.DECODE,)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await until(lambda: cluster.fleet.waiting == 1 and len(run.tokens) == 1)  # its prompt is computed meanwhile
    assert run.flight.life.state is RequestState.WAITING
    await cluster.report("d1", incarnation="2")
    await serving
    assert_served(run, cluster)


@pytest.mark.parametrize("role", list(Role))
async def test_without_a_spare_everybody_waits_and_goes_on_when_the_node_returns(role: Role) -> None:
    cluster = await Cluster(prefill=1, decode=1).join()
    point, node_id = (Point.PREFILL, "p0") if role is Role.PREFILL else (Point.TOKEN, "d0")
    gate = cluster.gate(point)
    runs = [Run(cluster) for _ in range(5)]
    serving = [asyncio.create_task(run.serve()) for run in runs]
    await cluster.script.reached[point].wait()
    cluster.now = 2.0
    await cluster.report("d0" if role is Role.PREFILL else "p0")
    cluster.now = 4.0
    cluster.fleet.nodes.expire()
    await until(lambda: cluster.fleet.waiting == 5)
    gate.set()
    newcomer = Run(cluster)
    serving.append(asyncio.create_task(newcomer.serve()))
    await until(lambda: cluster.fleet.waiting == 6)
    await cluster.report(node_id, incarnation="2")
    await asyncio.gather(*serving)
    for run in (*runs, newcomer):
        assert_served(run, cluster)


async def test_waiting_for_a_node_to_return_has_a_deadline(cluster: Cluster) -> None:
    cluster.now = 10.0
    cluster.fleet.nodes.expire()
    run = Run(cluster, deadlines=DeadlinesConfig(queue_s=0.02))
    with pytest.raises(DeadlineExceeded, match="queued"):
        await run.serve()
    assert cluster.fleet.waiting == 0


async def test_a_request_that_kills_nodes_stops_at_its_budget() -> None:
    cluster = await Cluster(prefill=1, decode=9).join()
    for node_id in cluster.decode:
        cluster.fail(node_id, Point.TOKEN)
    run = Run(cluster)
    with pytest.raises(NodeLost, match="d3 died"):
        await run.serve()
    assert sum(member.health.suspended_until > 0 for member in cluster.fleet.nodes.members()) == 4
    assert run.flight.life.state is RequestState.FAILED
    cluster.assert_idle()


async def test_a_decode_node_lost_while_the_prompt_is_computed_is_replaced_under_way(cluster: Cluster) -> None:
    gate = cluster.gate(Point.PREFILL)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.PREFILL].wait()
    await cluster.report("d0", incarnation="2")  # the node restarted: the reservation there is gone
    await until(lambda: len(decode_jobs(cluster)) == 2)
    assert not run.tokens
    gate.set()
    await serving
    assert_served(run, cluster)
    assert (prompts(cluster), decode_jobs(cluster)[1].emitted) == (1, ())


@pytest.mark.parametrize(
    "error", [FrameRefused("bad checksum"), TransferError("cut"), DeadlineExceeded("the receiver stalls")]
)
async def test_a_transfer_that_fails_goes_to_another_decode_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: HackkvError
) -> None:
    push = cluster.prefill["p0"]._push

    async def fails_once(job: PrefillJob, epoch: int, address: str, held: HeldKv) -> PrefillEvent:
        return HandoffFailed(epoch, error.code, str(error)) if epoch == 0 else await push(job, epoch, address, held)

    monkeypatch.setattr(cluster.prefill["p0"], "_push", fails_once)
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert (prompts(cluster), run.flight.route.decode_node) == (1, "d1")


async def test_word_of_a_push_that_is_over_is_counted_and_ignored(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = cluster.prefill["p0"]._push

    async def late(job: PrefillJob, epoch: int, address: str, held: HeldKv) -> PrefillEvent:
        fate = await push(job, epoch, address, held)
        return fate if epoch == 0 else HandoffFailed(0, "node_lost", "d0 went away")

    monkeypatch.setattr(cluster.prefill["p0"], "_push", late)
    cluster.fail("d0", Point.TOKEN)
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.route.strays == {"HandoffFailed": 1}


@pytest.mark.parametrize(("point", "field"), [(Point.LANDED, "transfer_s"), (Point.TOKEN, "token_s")])
def test_a_decode_node_that_stalls_is_left_for_another(point: Point, field: str) -> None:
    """On a clock that jumps: no other node is ever late."""

    async def serve() -> None:
        cluster = await Cluster().join()
        gate = cluster.gate(point)
        run = Run(cluster, deadlines=DeadlinesConfig(**{field: 5.0, "transfer_ktoken_s": 0.0}))
        serving = asyncio.create_task(run.serve())
        await asyncio.wait([serving], timeout=7.5)
        assert len(decode_jobs(cluster)) == 2
        gate.set()
        await serving
        assert_served(run, cluster)
        assert counted(run, "hackkv_failovers") == {'{cause="stalled",kind="reassigned"}': 1}

    on_a_virtual_clock(serve())


def test_a_swapped_sequence_has_a_deadline_of_its_own() -> None:
    """On a clock that jumps: no token is late, except those that were held up."""

    async def serve() -> None:
        cluster = await Cluster().join()
        cluster.script.swaps = True
        gate = cluster.gate(Point.TOKEN)
        run = Run(cluster, deadlines=DeadlinesConfig(token_s=5.0))
        serving = asyncio.create_task(run.serve())
        await cluster.script.reached[Point.TOKEN].wait()
        assert run.flight.life.state is RequestState.SWAPPED
        await asyncio.wait([serving], timeout=50.0)
        gate.set()
        await serving
        assert_served(run, cluster)
        assert run.flight.route.attempts == 1

    on_a_virtual_clock(serve())


async def test_a_client_with_tokens_is_not_told_that_prefill_is_full(cluster: Cluster) -> None:
    cluster.script.keeps_kv = False
    cluster.fail("d0", Point.TOKEN)
    for node_id in cluster.prefill:
        cluster.fail(node_id, Point.PREFILL, Overloaded("full", 0.01))
    cluster.script.faults["p0", Point.PREFILL].clear()
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await until(lambda: len(run.tokens) > 1)
    cluster.fail("p0", Point.PREFILL, Overloaded("full", 0.01))
    await serving
    assert_served(run, cluster)


async def test_who_was_let_in_is_not_turned_away_by_a_full_line() -> None:
    cluster = await Cluster(decode=1, pages=4, max_waiting=1).join()
    run = Run(cluster)
    gate = cluster.gate(Point.TOKEN)
    cluster.fail("d0", Point.TOKEN)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    waiting = asyncio.create_task(cluster.fleet.decode.book(cluster.demand(16 * 4)))
    await until(lambda: cluster.fleet.waiting == 1)
    gate.set()
    await until(lambda: cluster.fleet.waiting == 2)
    await cluster.report("d0")
    await serving  # this request is older than the other, so it goes first
    assert run.ids == count_up(run.flight.request)
    (await waiting).release()


async def test_time_of_a_lost_decode_node_stays_in_its_stage(cluster: Cluster) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    await asyncio.wait([serving], timeout=0.1)  # 0.1 s of decoding that no node will report
    await cluster.report("d0", incarnation="2")
    await until(lambda: len(decode_jobs(cluster)) == 2)
    gate.set()
    await serving
    assert_served(run, cluster)
    assert run.stages()[Stage.DECODE] >= 0.09
    run.assert_whole()


async def test_a_router_that_stops_ends_its_requests_with_an_error_they_can_act_on(cluster: Cluster) -> None:
    cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    closing = asyncio.create_task(run.dispatcher.close(grace_s=0.02))
    await until(lambda: run.dispatcher.closing)
    with pytest.raises(Unavailable, match="about to stop"):
        await run.dispatcher.serve(Run(cluster).flight)
    with pytest.raises(Unavailable, match="stopped before"):
        await serving
    await closing
    cluster.assert_idle()


async def test_a_router_that_stops_waits_for_requests_in_flight(cluster: Cluster) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    closing = asyncio.create_task(run.dispatcher.close(grace_s=60))
    gate.set()
    await asyncio.gather(serving, closing)
    assert_served(run, cluster)
