"""One request's life over scripted nodes: the order of events, and every way in which it can fail."""

from __future__ import annotations

import asyncio

import pytest

from hackkv.errors import (
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
from hackkv.held import HeldKv
from hackkv.types import Finish, Request, Role
from router.config import LimitsConfig
from router.life.dispatch import Dispatcher
from router.watch.metrics import Outcome
from tests.router.runs import PROMPT, Run, assert_served, until
from tests.router.scripted import PAGE_TOKENS, Cluster, Point, count_up, info


async def test_both_legs_serve_one_request(cluster: Cluster) -> None:
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert (run.flight.route.attempts, run.flight.route.prefill_node, run.flight.route.decode_node) == (1, "p0", "d0")
    assert [receipt.tokens for receipt in run.flight.route.receipts] == [len(PROMPT)]
    job, twin = cluster.prefill["p0"].jobs[0], cluster.decode["d0"].jobs[0]
    assert (job.transfer_id, job.epoch, job.decode_address) == (twin.transfer_id, twin.epoch, "inproc://d0")


async def test_token_0_does_not_wait_for_the_handoff(cluster: Cluster) -> None:
    gate = cluster.gate(Point.HANDOFF)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.HANDOFF].wait()
    assert len(run.tokens) == 1
    assert [member.booked.tokens for member in cluster.fleet.nodes.members(Role.PREFILL)] == [
        0,
        0,
    ]  # released at token 0
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
    holder = cluster.fleet.decode.try_book(cluster.demand(32))
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

    async def hasty(transfer_id: str, epoch: int, address: str, held: HeldKv) -> None:
        if refusals:
            raise refusals.pop()
        await assign(transfer_id, epoch, address, held)

    monkeypatch.setattr(node, "assign", hasty)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.PREFILL].wait()
    await cluster.fleet.nodes.register(info(Role.DECODE, "d0"))
    await serving
    assert_served(run, cluster)
    assert not refusals


async def test_the_prefill_node_hears_what_the_decode_node_holds(cluster: Cluster) -> None:
    """It hears of the held KV with the job if there is room at once, else with the assignment. Both
    requests count the held tokens."""
    cluster.script.held = HeldKv(1)
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    cluster.overload("d0", "d1")
    late = Run(cluster)
    cluster.script.reached[Point.PREFILL].clear()
    serving = asyncio.create_task(late.serve())
    await cluster.script.reached[Point.PREFILL].wait()
    await cluster.report("d0")
    await serving
    assert_served(late, cluster)
    assert [job.held.pages for node in cluster.prefill.values() for job in node.jobs] == [1, 0]
    assert run.flight.held_tokens == late.flight.held_tokens == PAGE_TOKENS


async def test_a_full_decode_node_sends_us_to_the_other(cluster: Cluster) -> None:
    cluster.overload("d0")
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert (run.flight.route.decode_node, run.flight.route.attempts) == ("d1", 1)


async def test_a_full_prefill_node_sends_us_to_the_other(cluster: Cluster) -> None:
    cluster.overload("p0")
    run = Run(cluster)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.route.prefill_node == "p1"


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
    assert run.flight.route.attempts == 2
    assert run.flight.output.diverged == 0
    jobs = [job for node in cluster.prefill.values() for job in node.jobs]
    assert len(jobs) == (2 if point is Point.PREFILL else 1)  # the KV is computed once and sent again
    assert run.flight.route.decode_node == "d1"


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
    run.assert_whole()


async def test_the_only_pair_is_tried_again() -> None:
    cluster = await Cluster(prefill=1, decode=1).join()
    cluster.fail("d0", Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await until(lambda: cluster.fleet.waiting == 1)
    await cluster.report("d0")  # the node is alive: only the connection broke
    await serving
    assert_served(run, cluster)


@pytest.mark.parametrize("error", [NonFiniteError("layer 0: NaN"), RequestError("too long", "prompt")])
async def test_what_would_fail_again_is_not_retried(cluster: Cluster, error: HackkvError) -> None:
    cluster.fail("p0", Point.PREFILL, error)
    run = Run(cluster)
    with pytest.raises(type(error)):
        await run.serve()
    assert run.flight.route.attempts == 1
    cluster.assert_idle()


async def test_a_prefill_node_that_dies_after_the_handoff_does_no_harm(cluster: Cluster) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    cluster.now = 2.0
    for node_id in cluster.decode:
        await cluster.fleet.nodes.register(info(Role.DECODE, node_id))
    cluster.now = 4.0
    cluster.fleet.nodes.expire()
    gate.set()
    await serving
    assert run.ids == count_up(run.flight.request)
    assert run.flight.route.attempts == 1


@pytest.mark.parametrize("steps", [0, 20])
async def test_a_lost_lease_moves_requests_at_once(cluster: Cluster, steps: int) -> None:
    gate = cluster.gate(Point.TOKEN)
    run = Run(cluster)
    serving = asyncio.create_task(run.serve())
    await cluster.script.reached[Point.TOKEN].wait()
    cluster.now = 2.0
    for node_id in ("p0", "p1"):
        await cluster.fleet.nodes.register(info(Role.PREFILL, node_id))
    await cluster.fleet.nodes.register(info(Role.DECODE, "d1"))
    cluster.now = 4.0
    cluster.fleet.nodes.expire()
    for _ in range(steps):  # with no steps, the last token and the loss of the node come together
        await asyncio.sleep(0)
    gate.set()
    await serving
    assert_served(run, cluster)
    assert run.flight.route.decode_node == ("d1" if steps else "d0")


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
    assert (run.flight.output.diverged, run.flight.route.attempts) == (1, 3)


async def test_stages_sum_to_the_total(cluster: Cluster) -> None:
    run = Run(cluster)
    await run.serve()
    run.assert_whole()
    run.metrics.ended(run.flight, Outcome.LENGTH)
    page = run.metrics.render().decode()
    assert f'hackkv_request_stage_seconds_count{{codec="{cluster.fleet.nodes.codec}",stage="stream"}} 1.0' in page


async def test_events_out_of_order_are_counted_and_change_nothing(cluster: Cluster) -> None:
    cluster.script.babbles = cluster.script.swaps = True
    run = Run(cluster, max_tokens=4)
    await run.serve()
    assert_served(run, cluster)
    assert run.flight.route.strays == {"Prefilled": 1, "Landed": 3, "Decoded": 3, "Swapped": 1, "Token": 1}


async def test_too_many_at_once_is_overload(cluster: Cluster) -> None:
    gate = cluster.gate(Point.PREFILL)
    first, second = Run(cluster), Run(cluster)
    dispatcher = Dispatcher(cluster.fleet, first.metrics, limits=LimitsConfig(max_inflight=1))
    serving = asyncio.create_task(dispatcher.serve(first.flight))
    await until(lambda: dispatcher.inflight == 1)
    with pytest.raises(Overloaded):
        await dispatcher.serve(second.flight)
    gate.set()
    await serving
    assert_served(first, cluster)


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
