"""One request's life over scripted nodes: the order of things, and every way it can go wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import (
    DeadlineExceeded,
    FrameRefused,
    HackkvError,
    HandshakeRefused,
    NodeLost,
    NonFiniteError,
    Overloaded,
    RequestError,
    TransferError,
    Unavailable,
)
from hackkv.timing import Stage
from hackkv.types import Finish, Request, Role
from router.dispatch import Dispatcher
from router.lifecycle import Deadlines
from router.metrics import Outcome
from tests.router.runs import PROMPT, Run, assert_served, until
from tests.router.scripted import Cluster, Point, count_up, info, whole


async def test_both_legs_serve_one_request(cluster: Cluster) -> None:
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert (run.flight.attempts, run.flight.prefill_node, run.flight.decode_node) == (1, "p0", "d0")
    assert [receipt.tokens for receipt in run.flight.receipts] == [len(PROMPT)]
    job, twin = cluster.prefill["p0"].jobs[0], cluster.decode["d0"].jobs[0]
    assert (job.transfer_id, job.epoch, job.decode_address) == (twin.transfer_id, twin.epoch, "d0")


async def test_token_0_does_not_wait_for_the_handoff(cluster: Cluster) -> None:
    gate = cluster.gate(Point.HANDOFF)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.HANDOFF].wait()
    assert len(run.tokens) == 1
    assert [member.tokens for member in cluster.fleet.members(Role.PREFILL)] == [0, 0]  # released at token 0
    gate.set()
    await serving
    assert_served(run, cluster)


async def test_one_token_needs_no_decode_node() -> None:
    cluster = await Cluster(decode=0).join()
    run = Run(cluster, max_tokens=1)
    await run.serve()
    assert_served(run, cluster)
    assert cluster.prefill["p0"].jobs[0].handoff is False


async def test_a_token_0_that_ends_the_request_closes_the_decode_leg(cluster: Cluster) -> None:
    cluster.script.answer = lambda request: [7]
    run = Run(cluster)
    await run.serve()
    assert [(token.token_id, token.finish) for token in run.tokens] == [(7, Finish.STOP)]
    cluster.assert_idle()


@pytest.mark.parametrize("index", [0, 1, 3])
async def test_a_client_that_has_enough_ends_both_legs(cluster: Cluster, index: int) -> None:
    run = Run(cluster)
    run.enough = lambda token: token.index == index
    await run.serve()
    assert len(run.tokens) == index + 1
    cluster.assert_idle()


async def test_without_room_prefill_starts_and_the_handoff_is_assigned_later() -> None:
    cluster = await Cluster(decode=1, pages=2).join()
    holder = cluster.fleet.try_book_decode(whole(32))
    assert holder is not None
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.PREFILL].wait()
    while not run.tokens:  # noqa: ASYNC110  (token 0 comes although no decode node has room)
        await asyncio.sleep(0)
    assert cluster.fleet.waiting == 1
    holder.release()
    await serving
    assert_served(run, cluster)
    assert cluster.prefill["p0"].jobs[0].decode_address == ""


async def test_an_assignment_that_overtakes_its_job_is_repeated(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.overload("d0", "d1")
    refusals = [HandshakeRefused("unknown transfer")]
    node = cluster.prefill["p0"]
    assign = node.assign

    async def hasty(transfer_id: str, epoch: int, address: str) -> None:
        if refusals:
            raise refusals.pop()
        await assign(transfer_id, epoch, address)

    monkeypatch.setattr(node, "assign", hasty)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.PREFILL].wait()
    await cluster.fleet.register(info(Role.DECODE, "d0"))
    await serving
    assert_served(run, cluster)
    assert not refusals


async def test_a_full_decode_node_sends_us_to_the_other(cluster: Cluster) -> None:
    cluster.overload("d0")
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert (run.flight.decode_node, run.flight.attempts) == ("d1", 1)


async def test_a_full_prefill_node_sends_us_to_the_other(cluster: Cluster) -> None:
    cluster.overload("p0")
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.prefill_node == "p1"


async def test_when_all_prefill_nodes_are_full_the_client_hears_it(cluster: Cluster) -> None:
    cluster.overload("p0", "p1")
    with pytest.raises(Overloaded):
        await Run(cluster).serve()
    cluster.assert_idle()


FAULTS = [
    (Point.PREFILL, "p0", NodeLost("gone")),
    (Point.HANDOFF, "p0", FrameRefused("checksum of plane k_codes", "corrupt")),
    (Point.HANDOFF, "p0", HandshakeRefused("fingerprint")),
    (Point.HANDOFF, "p0", TransferError("cut")),
    (Point.RESERVE, "d0", NodeLost("gone")),
    (Point.LANDED, "d0", TransferError("stale")),
    (Point.TOKEN, "d0", NodeLost("gone")),
]


@pytest.mark.parametrize(("point", "node_id", "error"), FAULTS, ids=lambda value: str(value))
async def test_one_failure_is_survived_on_another_pair(
    cluster: Cluster, point: Point, node_id: str, error: HackkvError
) -> None:
    cluster.fail(node_id, point, error)
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.attempts == 2
    assert run.flight.diverged == 0
    jobs = [job for node in cluster.prefill.values() for job in node.jobs]
    assert len(jobs) == (2 if point is Point.PREFILL else 1)  # the KV is computed once and sent again
    assert run.flight.decode_node == "d1"


@pytest.mark.parametrize(("point", "node_id", "error"), FAULTS, ids=lambda value: str(value))
async def test_the_failure_that_is_too_many_reaches_the_client(
    cluster: Cluster, point: Point, node_id: str, error: HackkvError
) -> None:
    for twin in (node_id, node_id.replace("0", "1")):
        cluster.fail(twin, point, error, error)
    run = Run(cluster, max_failovers=1)
    with pytest.raises(type(error), match=str(error)):
        await run.serve()
    cluster.assert_idle()
    assert sum(run.flight.clock.stages().values()) == pytest.approx(run.flight.clock.total_s, rel=0.01, abs=1e-3)


async def test_the_only_pair_is_tried_again() -> None:
    cluster = await Cluster(prefill=1, decode=1).join()
    cluster.fail("d0", Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await until(lambda: cluster.fleet.waiting == 1)
    await cluster.report("d0")  # it is alive: only the connection broke
    await serving
    assert_served(run, cluster)


@pytest.mark.parametrize("error", [NonFiniteError("layer 0: NaN"), RequestError("too long", "prompt")])
async def test_what_would_fail_again_is_not_retried(cluster: Cluster, error: HackkvError) -> None:
    cluster.fail("p0", Point.PREFILL, error)
    run = Run(cluster)
    with pytest.raises(type(error)):
        await run.serve()
    assert run.flight.attempts == 1
    cluster.assert_idle()


async def test_a_prefill_node_that_dies_after_the_handoff_does_no_harm(cluster: Cluster) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    cluster.now = 2.0
    for node_id in cluster.decode:
        await cluster.fleet.register(info(Role.DECODE, node_id))
    cluster.now = 4.0
    cluster.fleet.expire()
    gate.set()
    await serving
    assert run.ids == count_up(run.flight.request)
    assert run.flight.attempts == 1


@pytest.mark.parametrize("steps", [0, 20])
async def test_a_lost_lease_moves_requests_at_once(cluster: Cluster, steps: int) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    cluster.now = 2.0
    for node_id in ("p0", "p1"):
        await cluster.fleet.register(info(Role.PREFILL, node_id))
    await cluster.fleet.register(info(Role.DECODE, "d1"))
    cluster.now = 4.0
    cluster.fleet.expire()
    for _ in range(steps):  # with none, the last token and the bad news come together
        await asyncio.sleep(0)
    gate.set()
    await serving
    assert_served(run, cluster)
    assert run.flight.decode_node == ("d1" if steps else "d0")


async def test_no_nodes_at_all_is_unavailable() -> None:
    cluster = await Cluster(prefill=0, decode=0).join()
    with pytest.raises(Unavailable):
        await Run(cluster).serve()


async def test_a_replay_that_begins_otherwise_is_counted_and_never_sent(cluster: Cluster) -> None:
    cluster.fail("d0", Point.TOKEN)
    cluster.script.keeps_kv = False

    def answer(request: Request) -> list[int]:
        prompts = sum(len(node.jobs) for node in cluster.prefill.values())
        return [9, 9, 9, 9, 9] if prompts == 2 else [1, 2, 3, 4, 5]

    cluster.script.answer = answer
    run = Run(cluster)
    await run.serve()
    assert run.ids == [1, 2, 3, 4, 5]
    assert (run.flight.diverged, run.flight.attempts) == (1, 3)


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
    assert sum(run.flight.clock.stages().values()) == pytest.approx(run.flight.clock.total_s, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("steps", range(40))
async def test_cancelling_after_any_number_of_steps_leaves_nothing(cluster: Cluster, steps: int) -> None:
    cluster.overload("d0", "d1")
    serving = asyncio.create_task(Run(cluster).serve())
    for _ in range(steps):
        await asyncio.sleep(0)
        if steps == 5:
            await cluster.fleet.register(info(Role.DECODE, "d1"))
    serving.cancel()
    await asyncio.wait([serving])
    await cluster.fleet.register(info(Role.DECODE, "d0"))
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
        deadlines = replace(Deadlines(), **{"total_s" if in_all else deadline: 5.0})
        run = Run(cluster, deadlines=deadlines, max_failovers=0)
        with pytest.raises(DeadlineExceeded):
            await run.serve()
        cluster.assert_idle()
        assert run.stages() == {stage: pytest.approx(5.0, abs=0.1)}  # a transfer has more for each token

    on_a_virtual_clock(serve())


async def test_waiting_for_room_has_a_deadline() -> None:
    cluster = await Cluster(decode=1, pages=2).join()
    assert cluster.fleet.try_book_decode(whole(32))
    run = Run(cluster, deadlines=Deadlines(queue_s=0.02))
    with pytest.raises(DeadlineExceeded, match="waiting for room"):
        await run.serve()
    assert max(run.stages(), key=lambda name: run.stages()[name]) is Stage.SWAP_WAIT


async def test_stages_sum_to_the_total(cluster: Cluster) -> None:
    run = Run(cluster)
    await run.serve()
    stages, total = run.flight.clock.stages(), run.flight.clock.total_s
    assert sum(stages.values()) == pytest.approx(total, abs=1e-3)
    run.metrics.ended(run.flight, Outcome.LENGTH)
    page = run.metrics.render().decode()
    assert f'hackkv_request_stage_seconds_count{{codec="{cluster.fleet.codec}",stage="stream"}} 1.0' in page


async def test_too_many_at_once_is_overload(cluster: Cluster) -> None:
    run = Run(cluster)
    dispatcher = Dispatcher(cluster.fleet, run.metrics, Deadlines(), max_inflight=0)
    with pytest.raises(Overloaded):
        await dispatcher.serve(run.flight)


async def test_hundreds_at_once_with_little_room_all_end() -> None:
    cluster = await Cluster(pages=5, max_waiting=200).join()
    runs = [Run(cluster, max_tokens=3 + index % 5) for index in range(200)]
    cluster.fail("d0", Point.TOKEN, *(NodeLost("gone") for _ in range(5)))
    async with asyncio.TaskGroup() as tasks:
        for run in runs:
            tasks.create_task(run.serve())
    for run in runs:
        assert run.ids == count_up(run.flight.request)
    cluster.assert_idle()
