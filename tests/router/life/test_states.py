"""The table of states, its drawing, and a cluster that breaks in every way while its moves are checked by the table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hackkv.errors import HackkvError, NodeDraining, NodeLost, TransferError
from router.config import DeadlinesConfig
from router.life.lifecycle import IllegalMove, Lifecycle, limit_s
from router.life.states import TABLE, RequestState, drawing, table
from tests.router.runs import Run
from tests.router.scripted import Cluster, Point, count_up

REQUEST = Path(__file__).parents[3] / "docs" / "request.md"


def test_every_state_has_an_owner_a_way_on_and_a_deadline_that_can_be_set() -> None:
    assert set(TABLE) == set(RequestState)
    for state, rule_ in TABLE.items():
        ends = state in (RequestState.DONE, RequestState.FAILED)
        assert rule_.owner
        assert (rule_.deadline is None) == (not rule_.next) == ends
        assert ends or RequestState.FAILED in rule_.next
        if rule_.deadline:
            assert rule_.deadline in DeadlinesConfig.model_fields


def test_every_state_is_reached_and_every_request_can_end() -> None:
    reached = {RequestState.QUEUED}
    while more := {to for state in reached for to in TABLE[state].next} - reached:
        reached |= more
    assert reached == set(RequestState)
    ending = {RequestState.DONE}
    while more := {state for state in RequestState if TABLE[state].next & ending} - ending:
        ending |= more
    assert ending == set(RequestState) - {RequestState.FAILED}


def test_the_drawing_in_the_documents_is_the_table() -> None:
    text = REQUEST.read_text(encoding="utf-8")
    assert f"```mermaid\n{drawing()}\n```" in text, "paste the output of `python -m router.life.states`"
    assert table() in text, "paste the output of `python -m router.life.states`"


def test_the_deadline_of_a_transfer_grows_with_what_is_transferred() -> None:
    deadlines = DeadlinesConfig(transfer_s=60, transfer_ktoken_s=1)
    assert limit_s(deadlines, RequestState.TRANSFERRING, 128_000) == 188
    assert limit_s(deadlines, RequestState.DECODING, 128_000) == deadlines.token_s


PATHS: dict[RequestState, tuple[RequestState, ...]] = {RequestState.QUEUED: ()}
"""Moves of the table that lead to each state."""
while len(PATHS) < len(RequestState):
    PATHS |= {to: (*path, to) for now, path in list(PATHS.items()) for to in TABLE[now].next if to not in PATHS}


@pytest.mark.parametrize("to", list(RequestState))
@pytest.mark.parametrize("now", list(RequestState))
async def test_a_request_moves_as_the_table_says_or_stays_where_it_is(now: RequestState, to: RequestState) -> None:
    life = Lifecycle()
    for step in PATHS[now]:
        life.move(step)
    if to is now or to in TABLE[now].next:
        life.move(to)
        assert life.state is to
    else:
        with pytest.raises(IllegalMove, match=f"from {now} to {to}"):
            life.move(to)
        assert life.state is now
    with pytest.raises(AttributeError):
        life.state = to  # type: ignore[misc]


async def test_the_decode_side_of_a_request_that_is_prefilling_moves_as_the_table_says() -> None:
    life = Lifecycle()
    life.move(RequestState.PREFILLING)
    with pytest.raises(IllegalMove):
        life.ahead(RequestState.DECODING)
    life.ahead(RequestState.WAITING)
    with pytest.raises(IllegalMove):
        life.ahead(RequestState.TRANSFERRING)
    life.ahead(RequestState.OFFERED)
    states = [life.state]
    life.catch_up()
    states.append(life.state)
    life.ahead(RequestState.TRANSFERRING)
    assert [*states, life.state] == [RequestState.PREFILLING, RequestState.OFFERED, RequestState.TRANSFERRING]


class Watched(Lifecycle):
    """A life that records moves that were tried and are not in the table."""

    def __init__(self, illegal: list[str]) -> None:
        super().__init__()
        self._illegal = illegal

    def move(self, to: RequestState) -> None:
        """See `Lifecycle.move`."""
        with self._watched():
            super().move(to)

    def ahead(self, to: RequestState) -> None:
        """See `Lifecycle.ahead`."""
        with self._watched():
            super().ahead(to)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except IllegalMove as error:
            self._illegal.append(str(error))
            raise


FAULTS: list[tuple[Point, type[HackkvError]]] = [
    (Point.PREFILL, NodeLost),
    (Point.PREFILL, NodeDraining),
    (Point.HANDOFF, TransferError),
    (Point.HANDOFF, NodeLost),
    (Point.RESERVE, NodeLost),
    (Point.RESERVE, NodeDraining),
    (Point.LANDED, TransferError),
    (Point.LANDED, NodeLost),
    (Point.TOKEN, NodeLost),
    (Point.TOKEN, NodeDraining),
]
NODES = ("p0", "p1", "d0", "d1")


class Requests(RuleBasedStateMachine):
    """Requests come, nodes fail, swap, drain, restart and vanish; every move must be one that the table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.runs: list[tuple[Run, asyncio.Task[None]]] = []
        self.illegal: list[str] = []
        self.incarnation = 1

    @initialize(keeps_kv=st.booleans(), pages=st.sampled_from([3, 8]))
    def begin(self, keeps_kv: bool, pages: int) -> None:
        """Start two prefill and two decode nodes with little room."""

        async def create() -> Cluster:
            return await Cluster(pages=pages).join()

        self.cluster = self.loop.run_until_complete(create())
        self.cluster.script.keeps_kv = keeps_kv

    @rule(max_tokens=st.integers(1, 8), steps=st.integers(0, 30))
    def request(self, max_tokens: int, steps: int) -> None:
        """A request comes."""

        async def start() -> None:
            run = Run(self.cluster, max_tokens, max_failovers=1000)
            run.flight.life = Watched(self.illegal)
            self.runs.append((run, asyncio.create_task(run.serve())))
            await asyncio.sleep(0)

        self.loop.run_until_complete(start())
        self.turn(steps)

    @rule(steps=st.integers(1, 30))
    def turn(self, steps: int) -> None:
        """Let the event loop turn."""

        async def turn() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    @rule(fault=st.sampled_from(FAULTS), twin=st.sampled_from("01"))
    def fail(self, fault: tuple[Point, type[HackkvError]], twin: str) -> None:
        """The next request that reaches this point of the node meets a fault."""
        point, error = fault
        role = "p" if point in (Point.PREFILL, Point.HANDOFF) else "d"
        self.cluster.fail(f"{role}{twin}", point, error("planned"))

    @rule(node_id=st.sampled_from(NODES), draining=st.booleans())
    def report(self, node_id: str, draining: bool) -> None:
        """A heartbeat."""
        self.loop.run_until_complete(self.cluster.report(node_id, draining=draining))

    @rule(node_id=st.sampled_from(NODES))
    def restart(self, node_id: str) -> None:
        """A new process under the old name."""
        self.incarnation += 1
        self.loop.run_until_complete(self.cluster.report(node_id, incarnation=str(self.incarnation)))

    @rule()
    def lapse(self) -> None:
        """Every lease runs out."""
        self.cluster.now += 10.0
        self.loop.run_until_complete(self._expire())

    async def _expire(self) -> None:
        self.cluster.fleet.nodes.expire()

    @rule(babbles=st.booleans())
    def confusion(self, babbles: bool) -> None:
        """Nodes begin or cease to send events for which no request waits."""
        self.cluster.script.babbles = babbles

    @rule(swaps=st.booleans())
    def pressure(self, swaps: bool) -> None:
        """Decode nodes begin or cease to swap."""
        self.cluster.script.swaps = swaps

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), steps=st.integers(0, 10))
    def leave(self, data: st.DataObject, steps: int) -> None:
        """A client leaves."""
        run, task = data.draw(st.sampled_from(self.runs))
        self.runs.remove((run, task))
        task.cancel()
        self.loop.run_until_complete(asyncio.wait([task]))
        self.turn(steps)

    @invariant()
    def only_known_moves(self) -> None:
        """Every move that was tried is in the table."""
        assert not self.illegal

    @invariant()
    def clients_have_the_right_tokens(self) -> None:
        """No token is lost, repeated or wrong, at any moment."""
        for run, task in self.runs:
            assert run.ids == count_up(run.flight.request)[: len(run.ids)]
            if task.done():
                task.result()
                assert len(run.ids) == run.flight.request.sampling.max_tokens
                assert run.flight.life.state is RequestState.DONE

    def teardown(self) -> None:
        """Once every node is there again, every request ends, and nothing is held anywhere."""
        try:
            self.settle()
        finally:
            self.loop.close()

    def settle(self) -> None:
        """Bring every request to its end."""
        self.cluster.script.faults.clear()
        while not all(task.done() for _, task in self.runs):
            for node_id in NODES:
                self.restart(node_id)
            self.turn(200)
        self.only_known_moves()
        self.clients_have_the_right_tokens()
        self.cluster.assert_idle()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=30, stateful_step_count=25)
