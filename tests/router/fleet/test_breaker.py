"""Suspensions and drains in any order of events never take away the last node that works."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hackkv.types import Role
from router.fleet.booking import Booking
from tests.router.scripted import Cluster
from transport.base import PrefillNode

T = TypeVar("T")
NODES = st.sampled_from(["p0", "p1", "p2"])
LONGEST_SUSPENSION_S = 16.0


class Breaker(RuleBasedStateMachine):
    """Three prefill nodes that fail, recover, drain, leave and return."""

    bookings: Bundle[Booking[PrefillNode]] = Bundle("bookings")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this state machine's event loop."""
        return self.loop.run_until_complete(work)

    @initialize()
    def join(self) -> None:
        """Every node registers."""

        async def create() -> Cluster:
            return await Cluster(prefill=3).join()

        self.cluster = self.do(create())
        self.incarnations = 1

    def working(self) -> list[str]:
        """Nodes to which a request may go."""
        members = self.cluster.fleet.nodes.members(Role.PREFILL)
        return [m.node_id for m in members if not m.draining and not m.health.doubted]

    @rule(target=bookings)
    def book(self) -> Booking[PrefillNode]:
        """A request is placed at once if any node works. Otherwise it waits until one reports."""

        async def place() -> Booking[PrefillNode]:
            booking = asyncio.create_task(self.cluster.fleet.prefill.book(self.cluster.demand(10)))
            await asyncio.sleep(0)
            working = self.working()
            if not working:
                assert self.cluster.fleet.waiting == 1
                self.incarnations += 1
                await self.cluster.report("p0", incarnation=str(self.incarnations))
            else:
                assert self.cluster.fleet.waiting == 0
            return await booking

        booking = self.do(place())
        assert not booking.member.draining
        assert not booking.member.health.doubted
        return booking

    @rule(booking=consumes(bookings), how=st.sampled_from(["worked", "failed", "drained", "nothing"]))
    def end(self, booking: Booking[PrefillNode], how: str) -> None:
        """A request ends."""
        if how != "nothing":
            getattr(booking, how)()
        booking.release()

    @rule(node_id=NODES, draining=st.booleans())
    def report(self, node_id: str, draining: bool) -> None:
        """A heartbeat."""
        self.do(self.cluster.report(node_id, draining=draining))

    @rule(node_id=NODES)
    def restart(self, node_id: str) -> None:
        """A new process under the old name."""
        self.incarnations += 1
        self.do(self.cluster.report(node_id, incarnation=str(self.incarnations)))

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; leases run out."""
        self.cluster.now += seconds
        self.cluster.fleet.nodes.expire()

    @invariant()
    def suspensions_end(self) -> None:
        """No suspension lasts longer than the longest pause."""
        for member in self.cluster.fleet.nodes.members():
            assert member.health.suspended_until <= self.cluster.now + LONGEST_SUSPENSION_S

    def teardown(self) -> None:
        """Close the event loop."""
        self.loop.close()


TestBreaker = Breaker.TestCase
TestBreaker.settings = settings(max_examples=30, stateful_step_count=30)
