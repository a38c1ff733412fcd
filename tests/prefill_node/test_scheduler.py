"""The prefill queue: first come, first served, within the budget, by whole pages, and nothing is lost or held twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hackkv.pages import PagePool
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt

PAGES, SLOTS, PI = 10, 5, 4
WHOLE_POOL = PAGES * PI


class Queue(RuleBasedStateMachine):
    """Prompts come and go at any moment, also during a pass; passes succeed or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SLOTS)
        self.budget = 3 * PI
        self.scheduler: PrefillScheduler[int] = PrefillScheduler(self.pool, PI, self.budget + 1)
        self.added: list[Prompt[int]] = []
        self.in_pass: list[Chunk[int]] | None = None

    @property
    def alive(self) -> list[Prompt[int]]:
        """Prompts that have neither finished nor left, oldest first."""
        return [prompt for prompt in self.added if not prompt.left and prompt.done < prompt.num_tokens]

    @rule(num_tokens=st.integers(1, WHOLE_POOL))
    def add(self, num_tokens: int) -> None:
        """A prompt arrives."""
        assert self.scheduler.fits(num_tokens)
        self.added.append(Prompt(len(self.added), num_tokens))
        self.scheduler.add(self.added[-1])

    @precondition(lambda self: self.in_pass is None)
    @rule(admit=st.booleans())
    def start(self, admit: bool) -> None:
        """A pass starts: its chunks go on where their prompts stand, within the budget, the oldest first."""
        chunks = self.in_pass = self.scheduler.schedule(lambda _: admit)
        alive, had_pages = self.alive, [prompt for prompt in self.alive if prompt.grant]
        assert sum(chunk.count for chunk in chunks) <= self.budget
        for chunk in chunks:
            assert chunk.start == chunk.prompt.done
            assert chunk.start % PI == 0
            assert chunk.count > 0
            assert chunk.is_last or chunk.count % PI == 0
            assert chunk.grant is chunk.prompt.grant
            assert len(chunk.grant.pages) == -(-chunk.prompt.num_tokens // PI)
        assert [prompt for prompt in alive if prompt.grant] == alive[: len(had_pages)], "a prompt overtook another"
        assert [chunk.prompt for chunk in chunks] == [p for p in alive if any(c.prompt is p for c in chunks)]
        if alive and (admit or had_pages):
            assert chunks, "a prompt could run and none did"
            assert chunks[0].prompt is alive[0]

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
        """Any prompt leaves, also twice, also when it is done, also during a pass."""
        self.scheduler.leave(data.draw(st.sampled_from(self.added)))

    @invariant()
    def pages_have_one_owner_and_come_back(self) -> None:
        """Pages are held by prompts that run, and until the end of the pass by those that left during it."""
        grants = [prompt.grant for prompt in self.added if prompt.grant]
        pages = [page for grant in grants for page in grant.pages]
        assert len(set(pages)) == len(pages) == PAGES - self.pool.free_pages
        assert len({grant.slot for grant in grants}) == len(grants) == SLOTS - self.pool.free_slots
        in_pass = {id(chunk.prompt) for chunk in self.in_pass or []}
        for prompt in self.added:
            finished = prompt.left or prompt.done == prompt.num_tokens
            assert not (finished and prompt.grant and id(prompt) not in in_pass), "a departed prompt holds pages"

    @invariant()
    def loads_are_told_truly(self) -> None:
        """What the router balances by."""
        if self.in_pass is None:
            assert self.scheduler.queued_tokens == sum(prompt.num_tokens - prompt.done for prompt in self.alive)
            assert self.scheduler.running == sum(prompt.grant is not None for prompt in self.alive)
            assert self.scheduler.waiting == sum(prompt.grant is None for prompt in self.alive)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, WHOLE_POOL), min_size=1, max_size=12), st.integers(PI, 5 * PI))
def test_every_prompt_ends_after_the_least_number_of_tokens(lengths: list[int], chunk_tokens: int) -> None:
    """Progress: passes end, no token is computed twice, and the pool is whole again."""
    pool = PagePool(PAGES, SLOTS)
    scheduler: PrefillScheduler[int] = PrefillScheduler(pool, PI, chunk_tokens)
    for index, length in enumerate(lengths):
        scheduler.add(Prompt(index, length))
    computed, order = 0, []
    while chunks := scheduler.schedule():
        computed += sum(chunk.count for chunk in chunks)
        order += [chunk.prompt.owner for chunk in chunks if chunk.start == 0]
        scheduler.commit()
    assert computed == sum(lengths)
    assert order == list(range(len(lengths)))
    assert (pool.free_pages, pool.free_slots, scheduler.queued_tokens) == (PAGES, SLOTS, 0)


def test_short_prompts_fill_what_a_page_leaves_of_the_budget() -> None:
    """A whole prompt may run in less than a page of budget; only cutting one needs whole pages."""
    scheduler: PrefillScheduler[int] = PrefillScheduler(PagePool(PAGES, SLOTS), PI, PI)
    for index, length in enumerate((1, 2, 1, 2)):
        scheduler.add(Prompt(index, length))
    assert [(chunk.prompt.owner, chunk.count) for chunk in scheduler.schedule()] == [(0, 1), (1, 2), (2, 1)]


def test_a_prompt_that_can_never_run_does_not_fit() -> None:
    scheduler: PrefillScheduler[int] = PrefillScheduler(PagePool(PAGES, SLOTS), PI, PI)
    assert not scheduler.fits(WHOLE_POOL + 1)
    with pytest.raises(ValueError, match="chunk_tokens 3 is less than a page of 4"):
        PrefillScheduler(PagePool(PAGES, SLOTS), PI, 3)
