"""Whatever arrives, lands, leaves or takes long, every admitted sequence ends, and no page is lost."""

from __future__ import annotations

import pytest
from hack_kernels.window import OWN_PAGE_ONLY
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from decode_node.seats import Place, Plan, Seat, publish
from hackkv.errors import Overloaded, RequestError
from hackkv.footprint import Footprint
from hackkv.page_names import Naming, PageName
from hackkv.types import Fingerprint

PI, PAGE_BYTES, ROW_BYTES = 4, 10, 3
NAMING = Naming(PI, Fingerprint(()))
FOOTPRINT = Footprint(PI, PAGE_BYTES, PAGE_BYTES, ROW_BYTES, OWN_PAGE_ONLY)


def scheduler(
    pages: int = 8, slots: int = 8, *, host_bytes: int = 10_000, max_batch: int = 4, replay_tokens: int = 2 * PI
) -> tuple[DecodeScheduler[str], PagePool]:
    pool = PagePool(pages, slots)
    made: DecodeScheduler[str] = DecodeScheduler(pool, FOOTPRINT, SchedulerLimits(host_bytes, max_batch, replay_tokens))
    return made, pool


class Schedules(RuleBasedStateMachine):
    """Any interleaving of requests, landings, steps, copies of any duration, and departures."""

    shares = False
    """Whether sequences begin with the same tokens, so that they share pages, which are kept."""

    @initialize(
        pages=st.integers(1, 12),
        slots=st.integers(1, 6),
        host_pages=st.integers(0, 40),
        max_batch=st.integers(1, 4),
    )
    def start(self, pages: int, slots: int, host_pages: int, max_batch: int) -> None:
        """A node of any size."""
        self.pool = PagePool(pages, slots, host_places=3)
        self.capacity = host_pages * PAGE_BYTES
        self.scheduler: DecodeScheduler[int] = DecodeScheduler(
            self.pool, FOOTPRINT, SchedulerLimits(self.capacity, max_batch, 2 * PI)
        )
        self.max_batch = max_batch
        self.landing: list[Seat[int]] = []
        self.landed: list[Seat[int]] = []
        self.copies: list[Seat[int]] = []
        self.loads: list[Seat[int]] = []
        self.tokens: dict[Seat[int], int] = {}
        self.plan: Plan[int] | None = None
        self.begun: set[Seat[int]] = set()
        self.names = 0

    def page_names(self, token: int, rows: int) -> tuple[PageName, ...]:
        """The page names of a sequence that repeats one token."""
        return NAMING.names((token,) * rows, "") if self.shares else ()

    @rule(prompt=st.integers(1, 30), output=st.integers(2, 30), token=st.integers(0, 1))
    def request(self, prompt: int, output: int, token: int) -> None:
        """A refusal takes nothing. Only a sequence that could not run alone is refused for good."""
        limit, free = prompt + output - 1, self.pool.free_pages
        try:
            seat = self.scheduler.admit(self.names, prompt, limit, self.page_names(token, prompt))
        except RequestError:
            assert limit // PI > self.pool.num_pages
            assert self.pool.free_pages == free
        except Overloaded:
            assert limit // PI <= self.pool.num_pages
            assert self.pool.free_pages == free
            assert self.holders(), "an empty node takes every request that fits"
        else:
            self.names += 1
            self.tokens[seat] = token
            self.landing.append(seat)
            if seat.loading:
                self.loads.append(seat)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        """Pages have arrived from host memory, even if their sequence has left."""
        self.scheduler.loaded(self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1))))

    @precondition(lambda self: self.shares)
    @rule()
    def save(self) -> None:
        """Idle pages get a copy in host memory."""
        self.pool.kept.saved(self.pool.kept.to_save(2))

    @precondition(lambda self: any(not seat.loading for seat in self.landing))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """The KV of some sequence has landed, possibly with tokens to replay."""
        seat = data.draw(st.sampled_from([seat for seat in self.landing if not seat.loading]))
        self.landing.remove(seat)
        publish(self.pool, seat, self.page_names(self.tokens[seat], seat.rows))
        self.scheduler.land(seat, data.draw(st.integers(1, seat.limit - seat.rows)))
        self.landed.append(seat)

    @precondition(lambda self: self.landing or self.landed)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Some sequence leaves, wherever its KV is."""
        group = data.draw(st.sampled_from([group for group in (self.landing, self.landed) if group]))
        seat = group.pop(data.draw(st.integers(0, len(group) - 1)))
        self.scheduler.leave(seat)
        self.scheduler.leave(seat)

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin_step(self) -> None:
        """Sequences in a step hold the pages that they need, and no copy touches them."""
        plan = self.scheduler.schedule()
        self.copies += [*plan.leaving, *plan.returning]
        assert len(plan.shares) <= self.max_batch
        orders = [share.seat.order for share in plan.shares]
        assert orders == sorted(orders)
        replayed = 0
        for share in plan.shares:
            seat = share.seat
            assert seat.place is Place.DEVICE
            assert share.rows >= 1
            assert seat.pages >= (seat.rows + share.rows) // PI
            assert share.replay == (seat.pending > 1)
            if share.replay:
                assert share.rows < seat.pending
                crosses = seat.rows % PI and (seat.rows + share.rows - 1) // PI > seat.rows // PI
                assert not crosses, "a chunk that starts inside a page ends with it"
                replayed += share.rows
            else:
                assert share.rows == 1
        assert replayed <= 2 * PI
        shares = {share.seat for share in plan.shares}
        for seat in self.begun - shares:
            here = seat.place is Place.DEVICE and seat.pending == 1
            assert not here or (seat.rows + 1) // PI > seat.pages, "pushed out of the batch, and not for its pages"
        skipped = [seat.order for seat in self.landed if seat.place is Place.DEVICE and seat not in shares]
        # A sequence that has the place of an older one, which waits for pages or for replay budget, must give it back.
        self.begun |= {seat for seat in shares if seat.order < min(skipped, default=self.names + 1)}
        self.plan = plan

    @precondition(lambda self: self.plan is not None)
    @rule(works=st.booleans())
    def end_step(self, works: bool = True) -> None:
        """The step is over. Sequences with all their tokens leave."""
        assert self.plan is not None
        self.scheduler.stepped(self.plan.shares, advanced=works)
        for share in self.plan.shares if works else ():
            publish(self.pool, share.seat, self.page_names(self.tokens[share.seat], share.seat.rows))
        self.plan = None
        for seat in [seat for seat in self.landed if seat.rows == seat.limit]:
            self.landed.remove(seat)
            self.scheduler.leave(seat)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        """Copies end in any order, at any time."""
        self.scheduler.copied(self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1))))

    def holders(self) -> set[Seat[int]]:
        """The sequences that may hold pages, slots or host memory."""
        in_step = [share.seat for share in self.plan.shares] if self.plan else []
        return {*self.landing, *self.landed, *self.copies, *self.loads, *in_step}

    @invariant()
    def everything_is_accounted_for(self) -> None:
        """Pages, slots and host bytes belong to present sequences, or to a step or copy that is not over."""
        if not hasattr(self, "pool"):
            return
        here = self.holders()
        pages = [page for seat in here if seat.grant for page in seat.grant.pages]
        assert self.shares or len(set(pages)) == len(pages)
        assert len(set(pages)) == self.pool.num_pages - self.pool.free_pages
        assert sum(seat.grant is not None for seat in here) == self.pool.num_slots - self.pool.free_slots
        assert sum(seat.host_bytes for seat in here) == self.scheduler.host_bytes <= self.capacity
        assert set(self.scheduler.seats) == {*self.landing, *self.landed}
        assert self.scheduler.is_roomy == (sum(seat.limit // PI for seat in here) <= self.pool.num_pages)
        lacking = sum(seat.limit // PI - seat.pages for seat in self.scheduler.seats)
        assert not self.scheduler.is_roomy or lacking <= self.pool.free_pages

    def teardown(self) -> None:
        """Without new requests every sequence ends, in a number of steps that the number of tokens bounds."""
        if not hasattr(self, "pool"):
            return
        if self.plan is not None:
            self.end_step()
        while self.loads:
            self.scheduler.loaded(self.loads.pop())
        while self.landing:
            seat = self.landing.pop()
            self.scheduler.land(seat)
            self.landed.append(seat)
        patience = 10 + 2 * sum(seat.limit - seat.rows for seat in self.landed)
        while self.landed:
            before = sum(seat.limit - seat.rows for seat in self.landed)
            self.begin_step()
            moved = bool(self.plan and self.plan.shares) or bool(self.copies)
            assert moved, "nobody runs and nothing moves"
            self.end_step()
            for seat in self.copies:
                self.scheduler.copied(seat)
            self.copies.clear()
            patience -= 1
            assert patience >= 0, f"{before} tokens are left and nobody runs"
        for seat in self.copies:
            self.scheduler.copied(seat)
        self.copies.clear()
        self.everything_is_accounted_for()
        assert self.pool.free_pages == self.pool.num_pages
        assert self.scheduler.host_bytes == 0


class SharedSchedules(Schedules):
    """The same schedules with sequences of which many have the same prefix."""

    shares = True


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=60)
TestSharedSchedules = SharedSchedules.TestCase
TestSharedSchedules.settings = settings(max_examples=150, stateful_step_count=60)


def landed(made: DecodeScheduler[str], name: str, tokens: int, limit: int, pending: int = 1) -> Seat[str]:
    """Admit and land a sequence, which then may run."""
    seat = made.admit(name, tokens, limit)
    made.land(seat, pending)
    return seat


def run(made: DecodeScheduler[str], steps: int) -> list[str]:
    """Run steps with copies that take no time; return the owners in the last step."""
    names: list[str] = []
    for _ in range(steps):
        plan = made.schedule()
        names = [share.seat.owner for share in plan.shares]
        made.stepped(plan.shares, advanced=True)
        for seat in (*plan.leaving, *plan.returning):
            made.copied(seat)
    return names


def test_the_batch_is_the_oldest_that_are_there_and_a_copy() -> None:
    made, _ = scheduler(max_batch=2)
    a, b, c = (landed(made, name, 1, 9) for name in "abc")
    plan = made.schedule()
    assert [share.seat for share in plan.shares] == [a, b]
    assert (made.running, made.waiting) == (2, 1)
    made.leave(a)
    assert [share.seat for share in plan.shares] == [a, b]
    made.stepped(plan.shares, advanced=True)
    assert [share.seat for share in made.schedule().shares] == [b, c]


def test_pages_are_taken_as_they_fill() -> None:
    made, pool = scheduler(pages=3)
    seat = landed(made, "a", PI - 1, 3 * PI)
    assert (seat.pages, pool.free_pages) == (1, 2)
    run(made, 1)
    assert (seat.rows, seat.pages) == (PI, 1)
    run(made, PI)
    assert (seat.rows, seat.pages) == (2 * PI, 2)


def test_the_youngest_leaves_in_time_and_goes_before_every_new_request() -> None:
    """Its pages are needed soon, so its copy has time. It comes back when the sequences on the device can go on."""
    made, pool = scheduler(pages=8)
    for name in "abc":
        landed(made, name, 2 * PI, 8 * PI)
    assert run(made, 1) == ["a", "b", "c"]
    while not made.swapped:
        names = run(made, 1)
    assert names == ["a", "b"]
    assert pool.free_pages > 0
    with pytest.raises(Overloaded, match="1 sequences wait in host memory and go first"):
        made.admit("d", 1, 2)
    held = made.host_bytes
    assert held >= 2 * PAGE_BYTES
    made.leave(next(seat for seat in made.seats if seat.owner == "a"))
    made.leave(next(seat for seat in made.seats if seat.owner == "b"))
    run(made, 1)
    assert made.host_bytes == 0
    assert run(made, 1) == ["c"]


def test_pages_that_a_copy_reads_or_writes_stay_taken_until_it_is_over() -> None:
    made, pool = scheduler(pages=4)
    landed(made, "a", 2 * PI, 4 * PI)
    young = landed(made, "b", 2 * PI - 3, 3 * PI)
    plan = made.schedule()
    while not plan.leaving:
        made.stepped(plan.shares, advanced=True)
        plan = made.schedule()
    assert plan.leaving == [young]
    before, held = pool.free_pages, young.pages
    made.leave(young)
    assert pool.free_pages == before
    made.copied(young)
    assert pool.free_pages == before + held
    assert made.host_bytes == 0


def test_without_host_memory_nobody_is_ever_swapped() -> None:
    made, _ = scheduler(pages=4, host_bytes=0)
    landed(made, "a", 1, 2 * PI)
    with pytest.raises(Overloaded, match="may not fit into this node's device and host memory"):
        made.admit("b", 1, 3 * PI)
    landed(made, "c", 1, 2 * PI)
    assert run(made, 2 * PI - 1) == ["a", "c"]


def test_replays_share_a_budget_and_decode_goes_on_beside_them() -> None:
    made, _ = scheduler(pages=20, replay_tokens=2 * PI)
    for name in "ab":
        landed(made, name, 1, 8 * PI, pending=4 * PI)
    landed(made, "c", 1, 9)
    rows = []
    for _ in range(4):
        plan = made.schedule()
        rows.append({share.seat.owner: share.rows for share in plan.shares})
        made.stepped(plan.shares, advanced=True)
    # Replays run to the end of the page, then in whole pages. The budget that one leaves is less than a page.
    assert rows == [
        {"a": PI - 1, "b": PI - 1, "c": 1},
        {"a": 2 * PI, "c": 1},
        {"a": PI, "b": PI, "c": 1},
        {"a": 1, "b": 2 * PI, "c": 1},
    ]


@pytest.mark.parametrize(("tokens", "param"), [(4 * PI, "prompt"), (4 * PI - 1, "max_tokens")])
def test_what_could_not_even_run_alone_is_refused_by_the_field_at_fault(tokens: int, param: str) -> None:
    made, _ = scheduler(pages=3)
    with pytest.raises(RequestError, match="tokens need 4 pages; this node has 3") as refused:
        made.admit("a", tokens, 4 * PI)
    assert refused.value.param == param


def test_an_impossible_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        scheduler(max_batch=0)
