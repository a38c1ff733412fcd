"""Processes of one router tell each other of their requests. Loads, marks and leases soon agree in all processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.page_names import MARK_BYTES
from hackkv.types import Role
from router.fleet.booking import Booking
from router.fleet.members import Booked
from router.fleet.order import Demand
from router.fleet.policy import Need, pages_for
from tests.router.scripted import PAGE_TOKENS, Cluster
from transport.base import DecodeNode, PrefillNode

MARKS = [number.to_bytes(MARK_BYTES, "big") for number in range(4)]
ANY = Booking[DecodeNode] | Booking[PrefillNode]


class Crew:
    """Several processes' fleets of the same nodes. `relay` brings the report of one to the others."""

    def __init__(self, clusters: list[Cluster]) -> None:
        self.clusters = clusters

    @classmethod
    async def of(cls, processes: int, decode: int = 2) -> Crew:
        """A crew whose processes all know all nodes."""
        return cls([await Cluster(decode=decode).join() for _ in range(processes)])

    def relay(self, index: int) -> None:
        """Bring the report of one process to the others."""
        if (report := self.clusters[index].fleet.sharing.report()) is not None:
            for other, cluster in enumerate(self.clusters):
                if other != index:
                    cluster.fleet.sharing.take(str(index), report)

    def relay_all(self) -> None:
        for index in range(len(self.clusters)):
            self.relay(index)

    def loads(self, index: int) -> dict[str, Booked]:
        """The load of each node, as one process sees it."""
        return {member.node_id: member.load for member in self.clusters[index].fleet.nodes.members()}


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode", "release", "relay"]), st.integers(0, 2), st.integers(1, 100)),
    max_size=40,
)


@given(ACTIONS)
def test_when_all_has_been_told_everybody_sees_what_all_have_booked(actions: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        crew, held = await Crew.of(3), list[tuple[int, ANY, Booked]]()
        for action, who, size in actions:
            fleet, asked = crew.clusters[who].fleet, Demand(Need(size, size), size)
            if action == "prefill":
                held.append((who, await fleet.prefill.book(asked), Booked(size, 0, 1)))
            elif action == "decode" and (booking := fleet.decode.try_book(asked)):
                held.append((who, booking, Booked(size, pages_for(size, PAGE_TOKENS), 1)))
            elif action == "release" and held:
                held.pop(size % len(held))[1].release()
            else:
                crew.relay(who)
        crew.relay_all()
        expected = dict.fromkeys(crew.loads(0), Booked())
        for _, share_of, share in held:
            expected[share_of.member.node_id] += share
        assert [crew.loads(index) for index in range(3)] == [expected] * 3
        crew.clusters[0].fleet.sharing.lost("1")
        for who, share_of, _ in held:
            if who != 1:
                share_of.release()
        crew.relay(0)
        crew.relay(2)
        assert crew.loads(0) == dict.fromkeys(expected, Booked())

    asyncio.run(play())


@pytest.mark.parametrize("role", Role)
async def test_load_is_even_whoever_places_the_requests(role: Role) -> None:
    crew = await Crew.of(2)
    placed: Counter[str] = Counter()
    for index in islice(cycle((0, 0, 0, 1)), 40):  # one takes three times as many
        fleet = crew.clusters[index].fleet
        desk = fleet.prefill if role is Role.PREFILL else fleet.decode
        placed[(await desk.book(crew.clusters[index].demand(PAGE_TOKENS))).member.node_id] += 1
        crew.relay(index)
    assert set(placed.values()) == {20}


async def test_room_that_another_process_gives_back_is_given_to_who_waits() -> None:
    crew = await Crew.of(2, decode=1)
    one, other = crew.clusters
    booking = one.fleet.decode.try_book(one.demand(60 * PAGE_TOKENS))
    assert booking is not None
    crew.relay(0)
    waiting = asyncio.create_task(other.fleet.decode.book(other.demand(10 * PAGE_TOKENS)))
    await asyncio.sleep(0)
    crew.relay(1)
    assert one.fleet.waiting == other.fleet.waiting == 1
    booking.release()
    crew.relay(0)
    assert (await waiting).member.load.pages == 10


async def test_a_page_that_one_process_brings_to_a_node_is_expected_there_by_all_and_told_once() -> None:
    crew = await Crew.of(2)
    for cluster in crew.clusters:
        await cluster.report("p1", marks=b"")
    one, other = (
        next(member for member in cluster.fleet.nodes.members() if member.node_id == "p1") for cluster in crew.clusters
    )
    one.expect(MARKS, 0.0)
    crew.relay(0)
    assert other.held_tokens(MARKS) == 4 * PAGE_TOKENS
    told = crew.clusters[1].fleet.sharing.report()
    assert told is not None
    assert told["marks"] == {}, "what was heard is not told again"


async def test_a_node_that_speaks_to_one_process_keeps_its_lease_with_all() -> None:
    crew = await Crew.of(2)
    for cluster in crew.clusters:
        cluster.now = 2.0
    next(member for member in crew.clusters[0].fleet.nodes.members() if member.node_id == "d1").heard(2.0)
    crew.relay(0)
    for cluster in crew.clusters:
        cluster.now = 4.0
        cluster.fleet.nodes.expire()
        assert [member.node_id for member in cluster.fleet.nodes.members()] == ["d1"]


async def test_nothing_is_told_while_nothing_happens_but_a_sign_of_life() -> None:
    cluster = await Cluster().join()
    assert cluster.fleet.sharing.report() is not None
    assert cluster.fleet.sharing.report() is None
    cluster.now += 0.75  # a quarter of the lease
    assert cluster.fleet.sharing.report() is not None
