"""The prefill queue keeps to its budget, cuts at whole pages, starves no prompt, and loses no page."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hackkv.errors import ConfigError
from prefill_node.host_pool import HostPool
from prefill_node.prefix_pool import PrefixPool
from prefill_node.scheduler import MAX_SKIPS, Chunk, PrefillScheduler, Prompt

PAGES, SLOTS, PI = 10, 5, 4
WHOLE_POOL = PAGES * PI


def page_pool(pages: int = PAGES, slots: int = SLOTS) -> PrefixPool:
    return PrefixPool(pages, slots, PI, HostPool(0, lambda _: None), 1)


class Queue(RuleBasedStateMachine):
    """Prompts come and go at any moment, also during a pass; passes succeed or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = page_pool()
        self.budget = 3 * PI
        self.scheduler: PrefillScheduler[int] = PrefillScheduler(self.pool, self.budget + 1)
        self.added: list[Prompt[int]] = []
        self.in_pass: list[Chunk[int]] | None = None

    @property
    def alive(self) -> list[Prompt[int]]:
        """Prompts that have neither finished nor left, oldest first."""
        return [prompt for prompt in self.added if not prompt.left and prompt.remaining]

    @rule(num_tokens=st.integers(1, WHOLE_POOL))
    def add(self, num_tokens: int) -> None:
        """A prompt arrives."""
        self.added.append(Prompt(len(self.added), num_tokens))
        self.scheduler.add(self.added[-1])

    @precondition(lambda self: self.in_pass is None)
    @rule(admit=st.booleans())
    def start(self, admit: bool) -> None:
        """A pass starts. Its chunks go on where their prompts stand, stay within the budget, and waste none of it."""
        chunks = self.in_pass = self.scheduler.schedule(lambda _: admit)
        alive, started = self.alive, [prompt for prompt in self.alive if prompt.grant]
        total = sum(chunk.count for chunk in chunks)
        assert total <= self.budget
        for chunk in chunks:
            assert chunk.start == chunk.prompt.done
            assert chunk.start % PI == 0
            assert chunk.count > 0
            assert chunk.is_last or chunk.count % PI == 0
            assert chunk.grant is chunk.prompt.grant
            assert len(chunk.grant.pages) == -(-chunk.prompt.num_tokens // PI)
        assert [chunk.prompt for chunk in chunks] == [p for p in alive if any(c.prompt is p for c in chunks)]
        if started:
            assert total > self.budget - PI or total == sum(prompt.remaining for prompt in started)
            if alive[0].grant:
                assert chunks[0].prompt is alive[0], "the oldest goes on in every pass"
                assert chunks[0].count >= min(PI, alive[0].remaining)
        if admit and alive and not started:
            assert chunks, "a prompt could run and none did"

    @precondition(lambda self: self.in_pass is not None)
    @rule()
    def commit(self) -> None:
        """The pass succeeds: exactly its tokens are done."""
        due = [(chunk.prompt, chunk.start + chunk.count) for chunk in self.in_pass or []]
        self.scheduler.commit()
        self.in_pass = None
        assert all(prompt.done == done for prompt, done in due)

    @precondition(lambda self: self.in_pass is not None)
    @rule()
    def abandon(self) -> None:
        """The pass fails: nothing is done."""
        before = [prompt.done for prompt in self.added]
        self.scheduler.abandon()
        self.in_pass = None
        assert [prompt.done for prompt in self.added] == before

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Any prompt leaves: perhaps twice, when it is done already, or during a pass."""
        self.scheduler.leave(data.draw(st.sampled_from(self.added)))

    @invariant()
    def pages_have_one_owner_and_come_back(self) -> None:
        """Pages are held by running prompts and, until the pass ends, by prompts that left during it."""
        grants = [prompt.grant for prompt in self.added if prompt.grant]
        pages = [page for grant in grants for page in grant.pages]
        assert len(set(pages)) == len(pages) == PAGES - self.pool.free_pages
        assert len({grant.slot for grant in grants}) == len(grants) == SLOTS - len(self.pool.idle_slots)
        in_pass = {id(chunk.prompt) for chunk in self.in_pass or []}
        for prompt in self.added:
            finished = prompt.left or not prompt.remaining
            assert not (finished and prompt.grant and id(prompt) not in in_pass), "a departed prompt holds pages"

    @invariant()
    def loads_are_told_truly(self) -> None:
        """The router balances prompts by these numbers."""
        if self.in_pass is None:
            assert self.scheduler.queued_tokens == sum(prompt.remaining for prompt in self.alive)
            assert self.scheduler.running == sum(prompt.grant is not None for prompt in self.alive)
            assert self.scheduler.waiting == sum(prompt.grant is None for prompt in self.alive)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.lists(st.integers(1, WHOLE_POOL), min_size=1, max_size=12), st.integers(PI, 5 * PI))
def test_every_prompt_ends_after_the_least_number_of_tokens(lengths: list[int], chunk_tokens: int) -> None:
    """Passes end, no token is computed twice, and the pool is whole again."""
    pool = page_pool()
    scheduler: PrefillScheduler[int] = PrefillScheduler(pool, chunk_tokens)
    for index, length in enumerate(lengths):
        scheduler.add(Prompt(index, length))
    computed = 0
    while chunks := scheduler.schedule():
        computed += sum(chunk.count for chunk in chunks)
        scheduler.commit()
    assert computed == sum(lengths)
    assert (pool.free_pages, len(pool.idle_slots), scheduler.queued_tokens) == (PAGES, SLOTS, 0)


@settings(max_examples=60)
@given(
    budget=st.integers(1, 6).map(lambda pages: pages * PI),
    older=st.lists(st.integers(1, 20 * PI), max_size=3),
    length=st.integers(1, 20 * PI),
    arrivals=st.lists(st.lists(st.integers(1, 3 * PI), max_size=6), max_size=40),
)
def test_nobody_starves_however_many_shorter_prompts_come(
    budget: int, older: list[int], length: int, arrivals: list[list[int]]
) -> None:
    """A prompt ends within twice as many passes as it and older prompts have pages, whatever comes after it."""
    scheduler: PrefillScheduler[str] = PrefillScheduler(page_pool(pages=10_000, slots=1000), budget)
    for each in older:
        scheduler.add(Prompt("older", each))
    victim = Prompt("victim", length)
    scheduler.add(victim)
    limit = 2 * sum(-(-each // PI) for each in (*older, length))
    for number in range(limit):
        for each in arrivals[number] if number < len(arrivals) else [1] * budget:
            scheduler.add(Prompt("younger", each))
        scheduler.schedule()
        scheduler.commit()
    assert victim.remaining == 0


@pytest.mark.parametrize("budget_pages", [1, 2, 3, 8])
@pytest.mark.parametrize("long", [100, 100_000])
def test_a_short_prompt_behind_a_long_one_waits_for_one_pass_at_most(budget_pages: int, long: int) -> None:
    """It comes while a pass runs, and runs to its end in the next pass: two chunks to its first token."""
    scheduler: PrefillScheduler[str] = PrefillScheduler(page_pool(pages=long, slots=8), budget_pages * PI)
    scheduler.add(Prompt("long", long))
    short_tokens = max(1, budget_pages // 2) * PI
    for _ in range(5):
        scheduler.schedule()
        short = Prompt("short", short_tokens)
        scheduler.add(short)
        scheduler.commit()
        chunks = scheduler.schedule()
        assert [(chunk.count, chunk.is_last) for chunk in chunks if chunk.prompt is short] == [(short_tokens, True)]
        scheduler.commit()


def test_who_finds_no_room_is_overtaken_a_few_times_only() -> None:
    """Otherwise an endless stream of small prompts would take all room that comes free."""
    scheduler: PrefillScheduler[str] = PrefillScheduler(page_pool(), 2 * PI)
    scheduler.add(Prompt("big", WHOLE_POOL))
    small = [Prompt("small", PI) for _ in range(MAX_SKIPS + 5)]
    for prompt in small:
        scheduler.add(prompt)
    while scheduler.schedule(lambda owner: owner == "small"):
        scheduler.commit()
    assert [prompt.remaining for prompt in small] == [0] * MAX_SKIPS + [PI] * 5
    assert scheduler.schedule()[0].prompt.owner == "big"


def test_a_prompt_starts_only_when_it_is_admitted() -> None:
    scheduler: PrefillScheduler[str] = PrefillScheduler(page_pool(), 2 * PI)
    asked: list[str] = []
    for name in ("refused", "taken"):
        scheduler.add(Prompt(name, PI))

    def admit(owner: str) -> bool:
        asked.append(owner)
        return owner == "taken"

    assert [chunk.prompt.owner for chunk in scheduler.schedule(admit)] == ["taken"]
    assert set(asked) == {"refused", "taken"}


def test_short_prompts_fill_what_a_page_leaves_of_the_budget() -> None:
    """A whole prompt may run in less than a page of budget. Only a prompt that is cut needs whole pages."""
    scheduler: PrefillScheduler[int] = PrefillScheduler(page_pool(), PI)
    for index, length in enumerate((1, 2, 1, 2)):
        scheduler.add(Prompt(index, length))
    assert [(chunk.prompt.owner, chunk.count) for chunk in scheduler.schedule()] == [(0, 1), (1, 2), (2, 1)]


def test_a_budget_below_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens: 3 is less than a page of 4"):
        PrefillScheduler(page_pool(), 3)
