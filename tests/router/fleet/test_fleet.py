"""Leases, fingerprints, room and the line for it. The clock is a number."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from chaos.loop import VirtualLoop
from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import HandshakeRefused, NodeLost, Overloaded, Unavailable
from hackkv.nodes import CONTROL_VERSION
from hackkv.types import WIRE_FORM, Fingerprint, Role
from router.fleet.booking import Booking
from router.fleet.fleet import Fleet
from router.fleet.health import Health
from router.fleet.members import Booked
from router.fleet.order import Demand
from router.fleet.policy import Need
from tests.router.scripted import PAGE_TOKENS, Cluster, info
from transport.base import DecodeNode


async def test_a_lease_that_is_not_renewed_ends_and_the_node_may_return(cluster: Cluster) -> None:
    fleet = cluster.fleet
    member = fleet.nodes.members(Role.DECODE)[0]
    cluster.now = 2.9
    for node_id in ("p0", "p1"):
        assert (await fleet.nodes.register(info(Role.PREFILL, node_id))).ttl_s == 3.0
    fleet.nodes.expire()
    assert not fleet.nodes.missing
    cluster.now = 3.1
    fleet.nodes.expire()
    assert fleet.nodes.missing == (Role.DECODE,)
    assert isinstance(member.gone.result(), NodeLost)
    assert str(member.gone.result()) == "decode node d0 lost its lease"
    await fleet.nodes.register(info(Role.DECODE, "d0"))
    assert not fleet.nodes.missing


def test_a_silent_node_is_gone_a_lease_after_its_last_word_or_a_quarter_of_one_later() -> None:
    async def silent() -> list[float]:
        cluster, loop, gone_at = Cluster(prefill=1, decode=1), asyncio.get_running_loop(), list[float]()
        fleet = Fleet(cluster.prefill.__getitem__, cluster.decode.__getitem__, lease_ttl_s=3.0)
        housekeeping = asyncio.create_task(fleet.nodes.run())
        for role, node_id in ((Role.PREFILL, "p0"), (Role.DECODE, "d0"), (Role.PREFILL, "p0")):
            await fleet.nodes.register(info(role, node_id))
            await asyncio.sleep(0.7)
        for role in (Role.DECODE, Role.PREFILL):
            (member,) = fleet.nodes.members(role)
            gone = asyncio.Event()
            member.gone.heed(gone, gone.set)
            await gone.wait()
            gone_at.append(loop.time())
        housekeeping.cancel()
        return gone_at

    decode, prefill = on_a_virtual_clock(silent())
    assert 0.7 + 3.0 <= decode <= 0.7 + 3.75
    assert 1.4 + 3.0 <= prefill <= 1.4 + 3.75


def test_a_router_that_was_held_up_does_not_take_its_nodes_for_dead() -> None:
    """It could not hear its nodes meanwhile. Nodes that are really gone are noticed one lease later."""

    async def stopped_for_a_minute(loop: VirtualLoop) -> tuple[int, int]:
        cluster = Cluster(prefill=1, decode=1)
        fleet = Fleet(cluster.prefill.__getitem__, cluster.decode.__getitem__, lease_ttl_s=3.0)
        for role, node_id in ((Role.PREFILL, "p0"), (Role.DECODE, "d0")):
            await fleet.nodes.register(info(role, node_id))
        housekeeping = asyncio.create_task(fleet.nodes.run())
        await asyncio.sleep(1)
        loop.skip(60)
        await asyncio.sleep(1)
        after_waking = len(fleet.nodes.members())
        await asyncio.sleep(3)
        housekeeping.cancel()
        return after_waking, len(fleet.nodes.members())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        assert runner.run(stopped_for_a_minute(loop)) == (2, 0)


async def test_a_restarted_node_takes_its_own_place(cluster: Cluster) -> None:
    before = cluster.fleet.nodes.members(Role.DECODE)[0]
    cluster.fleet.decode.try_book(cluster.demand(16))
    await cluster.fleet.nodes.register(info(Role.DECODE, "d0", incarnation="2"))
    after = next(member for member in cluster.fleet.nodes.members(Role.DECODE) if member.node_id == "d0")
    assert before.gone.done()
    assert after is not before
    assert after.booked == Booked()


async def test_another_fingerprint_is_refused_with_the_field_until_the_fleet_is_gone(cluster: Cluster) -> None:
    other = Fingerprint((("codec", "fp16"), ("model", "tiny")))
    stranger = info(Role.DECODE, "d0", fingerprint=other, incarnation="2")
    with pytest.raises(HandshakeRefused, match="codec: 'hack' in the fleet, 'fp16' at the node"):
        await cluster.fleet.nodes.register(stranger)
    cluster.now = 10.0
    cluster.fleet.nodes.expire()
    await cluster.fleet.nodes.register(stranger)
    assert cluster.fleet.nodes.codec == "fp16"


@pytest.mark.parametrize("version", [0, CONTROL_VERSION + 1])
async def test_a_node_of_another_version_is_refused_even_by_an_empty_fleet(version: int) -> None:
    """A node that knows no versions says 0."""
    nodes = Cluster(prefill=1, decode=1).fleet.nodes
    said = f"node p0 is of another version of hackkv: control_version {version}, the router's is {CONTROL_VERSION}"
    with pytest.raises(HandshakeRefused, match=said):
        await nodes.register(info(Role.PREFILL, "p0", control_version=version))


async def test_nodes_that_code_differently_on_the_wire_share_a_fleet() -> None:
    """The sender chooses the wire form. The form of pages at rest has to be equal."""
    nodes = Cluster(prefill=1, decode=1).fleet.nodes
    prefill = info(Role.PREFILL, "p0")
    await nodes.register(prefill)
    coded = Fingerprint((*prefill.fingerprint.fields, (WIRE_FORM, "zstd")))
    await nodes.register(info(Role.DECODE, "d0", fingerprint=coded))
    assert not nodes.missing


async def test_a_single_node_may_change_its_own_fingerprint() -> None:
    cluster = Cluster(prefill=1, decode=0)
    await cluster.join()
    other = Fingerprint((("codec", "fp16"),))
    await cluster.fleet.nodes.register(info(Role.PREFILL, "p0", fingerprint=other, incarnation="2"))
    assert cluster.fleet.nodes.codec == "fp16"


@pytest.mark.parametrize("change", [{"max_context": 0}, {"page_tokens": 0}, {"total_pages": 0}])
async def test_a_senseless_report_is_refused(cluster: Cluster, change: dict[str, int]) -> None:
    with pytest.raises(HandshakeRefused, match=next(iter(change))):
        await cluster.fleet.nodes.register(info(Role.DECODE, "d0", **change))


async def test_static_nodes_are_polled_into_the_fleet() -> None:
    cluster = Cluster(prefill=1, decode=1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cluster.fleet.nodes.run(((Role.PREFILL, "p0"), (Role.DECODE, "d0"))))
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()
    assert len(cluster.fleet.nodes.members()) == 2


async def test_prefill_load_is_counted_and_given_back_once(cluster: Cluster) -> None:
    first = await cluster.fleet.prefill.book(cluster.demand(100))
    second = await cluster.fleet.prefill.book(cluster.demand(10))
    third = await cluster.fleet.prefill.book(cluster.demand(10))
    assert first.member is not second.member
    assert third.member is second.member
    for booking in (first, first, second, third):
        booking.release()
    cluster.assert_idle()


async def test_room_is_the_report_corrected_by_our_own_bookings() -> None:
    cluster = await Cluster(decode=1, pages=10).join()
    booking = cluster.fleet.decode.try_book(cluster.demand(16 * 4))
    assert booking is not None
    member = booking.member
    assert member.free_pages == 6
    await cluster.fleet.nodes.register(info(Role.DECODE, "d0", total_pages=10, free_pages=2))  # somebody else holds 4
    assert member.free_pages == 2
    booking.release()
    assert member.free_pages == 6


async def test_who_waits_is_served_in_order_and_never_overtaken() -> None:
    cluster = await Cluster(decode=1, pages=10).join()
    holder = cluster.fleet.decode.try_book(cluster.demand(16 * 10))
    assert holder is not None
    served: list[str] = []

    async def wait(name: str, pages: int) -> Booking[DecodeNode]:
        booking = await cluster.fleet.decode.book(cluster.demand(16 * pages))
        served.append(name)
        return booking

    async with asyncio.TaskGroup() as tasks:
        big = tasks.create_task(wait("big", 8))
        await asyncio.sleep(0)
        small = tasks.create_task(wait("small", 2))
        late = tasks.create_task(wait("late", 2))
        await asyncio.sleep(0)
        assert cluster.fleet.decode.try_book(cluster.demand(16)) is None
        assert cluster.fleet.waiting == 3
        holder.release()
        await asyncio.wait([big, small])
        assert served == ["big", "small"]
        big.result().release()
    small.result().release()
    late.result().release()
    cluster.assert_idle()


@pytest.mark.parametrize("served_first", [False, True])
async def test_cancelled_waiters_leave_the_line(served_first: bool) -> None:
    cluster = await Cluster(decode=1, pages=10).join()
    holder = cluster.fleet.decode.try_book(cluster.demand(16 * 10))
    assert holder is not None
    waiting = asyncio.create_task(cluster.fleet.decode.book(cluster.demand(16 * 10)))
    await asyncio.sleep(0)
    if served_first:
        holder.release()  # the room is given to a task that is cancelled before it wakes up
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    holder.release()
    cluster.assert_idle()


async def test_the_line_has_an_end() -> None:
    cluster = await Cluster(decode=1, pages=1, max_waiting=1).join()
    holder = cluster.fleet.decode.try_book(cluster.demand(16))
    assert holder is not None
    waiting = asyncio.create_task(cluster.fleet.decode.book(cluster.demand(16)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await cluster.fleet.decode.book(cluster.demand(16))
    assert caught.value.retry_after_s >= 1
    holder.release()
    (await waiting).release()


async def test_who_waits_outlives_the_last_decode_node_and_goes_on_when_one_returns() -> None:
    cluster = await Cluster(decode=1, pages=1).join()
    assert cluster.fleet.decode.try_book(cluster.demand(16))
    waiting = asyncio.create_task(cluster.fleet.decode.book(cluster.demand(16)))
    await asyncio.sleep(0)
    cluster.now = 10.0
    cluster.fleet.nodes.expire()
    assert cluster.fleet.nodes.missing == (Role.PREFILL, Role.DECODE)
    newcomer = asyncio.create_task(cluster.fleet.prefill.book(cluster.demand(1)))
    await asyncio.sleep(0)
    assert cluster.fleet.waiting == 2
    await cluster.join()
    assert (await waiting).member.node_id == "d0"
    assert (await newcomer).member.node_id == "p0"


async def test_limits_are_remembered_while_nodes_are_away(cluster: Cluster) -> None:
    await cluster.report("d1", total_pages=99, free_pages=99, max_context=100)
    cluster.now = 2.0
    for node_id in ("p0", "p1", "d0"):
        await cluster.report(node_id)
    cluster.now = 4.0
    cluster.fleet.nodes.expire()  # d1 is away, perhaps only for a restart
    assert (cluster.fleet.capacity.max_context, cluster.fleet.capacity.max_request_tokens) == (100, 99 * PAGE_TOKENS)
    assert cluster.fleet.decode.try_book(cluster.demand(80 * PAGE_TOKENS)) is None
    cluster.now = 200.0
    await cluster.join()
    cluster.now = 400.0  # longer than anybody would wait for it
    cluster.fleet.nodes.expire()
    for node_id in ("p0", "d0"):
        await cluster.report(node_id)
    assert (cluster.fleet.capacity.max_context, cluster.fleet.capacity.max_request_tokens) == (512, 64 * PAGE_TOKENS)


async def test_a_refusing_node_counts_as_full_until_it_reports() -> None:
    cluster = await Cluster(decode=1, pages=10).join()
    booking = cluster.fleet.decode.try_book(cluster.demand(16))
    assert booking is not None
    booking.refused()
    booking.release()
    assert cluster.fleet.decode.try_book(cluster.demand(16)) is None
    await cluster.fleet.nodes.register(info(Role.DECODE, "d0", total_pages=10, free_pages=10))
    assert cluster.fleet.decode.try_book(cluster.demand(16)) is not None


async def test_a_failing_node_rests_and_is_then_tried_by_one_request(cluster: Cluster) -> None:
    fleet = cluster.fleet
    failed = await fleet.prefill.book(cluster.demand(1))
    failed.failed()
    failed.release()
    resting = failed.member
    cluster.now = 0.5
    await cluster.join()  # the node lives, but one of our requests broke there
    assert resting not in [(await fleet.prefill.book(cluster.demand(50))).member for _ in range(3)]
    cluster.now = 1.5
    probe = await fleet.prefill.book(cluster.demand(1))
    assert probe.member is resting
    assert (await fleet.prefill.book(cluster.demand(1))).member is not resting  # although its queue is shorter
    probe.worked()
    assert (await fleet.prefill.book(cluster.demand(1))).member is resting


async def test_what_a_node_sent_before_it_failed_does_not_clear_it() -> None:
    """The node was killed. One request sees its stream break, then the last event of another request is read."""
    cluster = await Cluster(prefill=1).join()
    broken, late = [await cluster.fleet.prefill.book(cluster.demand(1)) for _ in range(2)]
    broken.failed()
    late.worked()
    assert late.member.health.doubted
    cluster.now = late.member.health.suspended_until
    await cluster.join()  # the node lives after all
    probe = await cluster.fleet.prefill.book(cluster.demand(1))
    probe.worked()
    assert probe.member.health == Health()


async def test_suspensions_grow_but_never_empty_a_pool() -> None:
    cluster = await Cluster(prefill=1).join()
    for _ in range(3):
        booking = await cluster.fleet.prefill.book(cluster.demand(1))
        booking.failed()
        booking.failed()
        booking.release()
        await cluster.join()
        cluster.now = booking.member.health.suspended_until
    assert cluster.now == 1 + 2 + 4


async def test_context_is_the_smallest_and_room_the_largest(cluster: Cluster) -> None:
    await cluster.fleet.nodes.register(replace(info(Role.DECODE, "d0"), max_context=100))
    await cluster.fleet.nodes.register(replace(info(Role.DECODE, "d1"), total_pages=99))
    assert cluster.fleet.capacity.max_context == 100
    assert cluster.fleet.capacity.max_request_tokens == 99 * 16


async def test_an_empty_fleet_says_what_is_missing() -> None:
    fleet = Fleet(lambda _: pytest.fail("no node"), lambda _: pytest.fail("no node"))
    with pytest.raises(Unavailable, match="no prefill and no decode node"):
        _ = fleet.capacity.max_context
    demand = Demand(Need(1, 1), fleet.next_serial())
    with pytest.raises(Unavailable):
        fleet.decode.try_book(demand)
    with pytest.raises(Unavailable):
        await fleet.prefill.book(demand)
