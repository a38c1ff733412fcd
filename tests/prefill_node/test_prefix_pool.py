"""Shared pages: a held page contains what its name says, and every page and byte is counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hackkv import page_names as naming
from hackkv.page_names import Naming, PageName
from hackkv.types import Fingerprint
from prefill_node.fetched import Fetched
from prefill_node.host_pool import Claim, HostPool, Tenant
from prefill_node.prefix_pool import PrefixGrant, PrefixPool, SharedPage
from prefill_node.resume_points import ResumePoints

PAGES, SLOTS, POINTS, PI, PAGE_BYTES, HOST_BYTES = 4, 3, 2, 2, 10, 45
NAMING = Naming(PI, Fingerprint((("codec", "hack"),)))

prompts = st.builds(
    lambda pages, count, rest: tuple(token for page in pages[:count] for token in (page, page)) + (9,) * rest,
    st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1)]),
    st.integers(1, PAGES - 1),
    st.integers(0, 1),
)
"""Token ids that often begin alike; three of them do not fit at once."""


class Running:
    """A prompt that holds a grant: `done` of its pages are sealed."""

    def __init__(self, ids: tuple[int, ...], salt: str, grant: PrefixGrant) -> None:
        self.ids, self.salt, self.grant = ids, salt, grant
        self.done = grant.cached_tokens // PI

    def content(self, index: int) -> object:
        """The content that page `index` must have: everything on which its bytes depend."""
        return (self.salt, self.ids[: (index + 1) * PI])


class Pages(RuleBasedStateMachine):
    """Passes over prompts that come and go, with models of device and host memory that record what was written."""

    exact = False
    """Whether prompts need the exact rows at the end of the pages that they take over."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostPool(HOST_BYTES, lambda _: None)
        points = ResumePoints[SharedPage](range(SLOTS, SLOTS + POINTS)) if self.exact else None
        self.pool = PrefixPool(PAGES, SLOTS, PI, self.host, PAGE_BYTES, points=points)
        self.slots: dict[int, object] = {}
        self.device: dict[int, object] = {}
        self.memory: dict[int, object] = {}
        self.running: list[Running] = []
        self.others: list[Claim] = []
        self.offers: list[tuple[PageName, Fetched]] = []

    @rule(
        wanted=st.lists(st.tuples(prompts, st.sampled_from(["", "salt"]), st.booleans()), max_size=2),
        data=st.data(),
        succeeds=st.booleans(),
    )
    def run_a_pass(self, wanted: list[tuple[tuple[int, ...], str, bool]], data: st.DataObject, succeeds: bool) -> None:
        """Prompts start, pages move, and pages are computed. They are published if the pass succeeds."""
        started: list[Running] = []
        taken, waiting = self.held_slots, set(range(SLOTS)) - self.held_slots - set(self.pool.idle_slots)
        for ids, salt, hit in wanted:
            names = NAMING.names(ids, salt)
            room = self.pool.has_room(len(ids), names if hit else ())
            grant = self.pool.take(len(ids), names, hit=hit)
            assert (grant is not None) == room
            if grant is not None:
                assert len(grant.pages) == -(-len(ids) // PI)
                assert grant.cached_tokens < len(ids)
                assert hit or not grant.cached_tokens
                started.append(Running(ids, salt, grant))
        moves = self.pool.moves()
        assert waiting == {source.slot for source in moves.slots.keeps.values()} - taken, "else they were idle"
        for place, page in moves.saves.items():
            assert place < self.pool.places.count
            self.memory[place] = self.device[page]
        for page, place in moves.loads.items():
            self.device[page] = self.memory[place]
        for target, source in (*moves.slots.keeps.items(), *moves.slots.resumes.items()):
            _, held = cast("tuple[str, tuple[int, ...]]", self.slots[source.slot])
            assert len(held) == source.pages * PI
            self.slots[target] = self.slots[source.slot]
        for install in moves.installs:
            content, rows = cast("tuple[Callable[[int], object], object]", install.parts)
            for index in range(install.first, install.rows // PI):
                self.device[install.pages[index]] = content(index)
            self.slots[install.slot] = rows
        for each in started if self.exact else ():
            assert not each.done or self.slots[each.grant.slot] == each.content(each.done - 1)
        self.running += started
        for each in self.running:
            full = len(each.ids) // PI
            sealed = data.draw(st.sampled_from([full, full, each.done + (each.done < full)]))
            for index in range(each.done, sealed):
                self.device[each.grant.pages[index]] = each.content(index)
            self.slots[each.grant.slot] = each.content(sealed - 1)
            if succeeds:
                each.done = sealed
                self.pool.publish(each.grant, sealed)
        if self.exact and not succeeds:  # slots are overwritten: prompts start over
            self.all_leave()

    @rule(ids=prompts, salt=st.sampled_from(["", "salt"]), data=st.data())
    def fetch(self, ids: tuple[int, ...], salt: str, data: st.DataObject) -> None:
        """Pages of a prompt come from a decode node. They are offered until the prompt is complete."""
        names = NAMING.names(ids, salt)
        if names:
            end = data.draw(st.integers(1, len(names)))
            first = data.draw(st.integers(0, end - (not self.exact)))
            fetched = Fetched(first, end, 0)
            pages = {index: (salt, ids[: (index + 1) * PI]) for index in range(first, end)}
            fetched.parts = (pages.get, (salt, ids[: end * PI]))  # type: ignore[assignment]
            self.pool.places.offer(names[end - 1], fetched)
            self.offers.append((names[end - 1], fetched))

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A prompt whose pages were fetched is over."""
        name, fetched = self.offers.pop(data.draw(st.integers(0, len(self.offers) - 1)))
        self.pool.places.withdraw(name, fetched)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A prompt ends, or its client leaves."""
        each = data.draw(st.sampled_from(self.running))
        self.running.remove(each)
        self.pool.give_back(each.grant)
        with pytest.raises(ValueError, match="is not held"):
            self.pool.give_back(each.grant)

    @precondition(lambda self: self.running)
    @rule()
    def idle(self) -> None:
        """The node is idle for a moment."""
        self.all_leave()

    @rule()
    def forget_slots(self) -> None:
        """An idle node gives back the memory of slots that no prompt needs. Their rows are lost."""
        for slot in self.pool.idle_slots:
            self.slots.pop(slot, None)

    @property
    def held_slots(self) -> set[int]:
        """The slots of running prompts, one each."""
        slots = {each.grant.slot for each in self.running}
        assert len(slots) == len(self.running)
        return slots

    def all_leave(self) -> None:
        while self.running:
            self.pool.give_back(self.running.pop().grant)

    @rule(event=st.sampled_from(["pressed", "relaxed", "relaxed", "broken"]), num_bytes=st.integers(0, HOST_BYTES))
    def disturb(self, event: str, num_bytes: int) -> None:
        """Waiting KV takes host memory or gives it back, or an error makes the pool forget all names."""
        if event == "pressed" and (claim := self.host.claim(Tenant.WAITING, num_bytes, lambda: None)):
            self.others.append(claim)
        if event == "relaxed" and self.others:
            self.host.release(self.others.pop())
        if event == "broken" and num_bytes < PAGE_BYTES:
            self.pool.forget()
            assert self.pool.known_pages == (0, 0)

    @invariant()
    def every_sealed_page_holds_what_its_prompt_needs(self) -> None:
        """The way by which a page came does not matter."""
        for each in self.running:
            for index in range(each.done):
                assert self.device[each.grant.pages[index]] == each.content(index)

    @invariant()
    def pages_slots_and_bytes_add_up(self) -> None:
        """A held page is never free, even if prompts share it. Host memory is counted by the page."""
        held = {page for each in self.running for page in each.grant.pages}
        assert self.pool.free_pages == PAGES - len(held)
        free, idle = set(range(SLOTS)) - self.held_slots, set(self.pool.idle_slots)
        assert idle <= free if self.exact else idle == free
        assert self.host.bytes_of(Tenant.PREFIX) == PAGE_BYTES * self.pool.known_pages[1]

    def teardown(self) -> None:
        """Nothing is lost: as many prompts as there are slots get one each, and a prompt that needs every page gets
        them all."""
        self.all_leave()
        small = [grant for _ in range(SLOTS) if (grant := self.pool.take(1))]
        assert sorted(grant.slot for grant in small) == list(range(SLOTS))
        for grant in small:
            self.pool.give_back(grant)
        grant = self.pool.take(PAGES * PI)
        assert grant is not None
        assert sorted(grant.pages) == list(range(PAGES))


class ExactPages(Pages):
    """`Pages` with prompts that go on from exact rows: a prompt that takes over pages finds the rows at their end."""

    exact = True


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=80, stateful_step_count=30)
TestExactPages = ExactPages.TestCase
TestExactPages.settings = settings(max_examples=80, stateful_step_count=30)


def test_digests_that_collide_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of all prompts have the same digest here. Still no prompt gets the pages of another."""
    monkeypatch.setattr(naming, "_digest", lambda _: b"same")
    pool = PrefixPool(PAGES, SLOTS, PI, HostPool(0, lambda _: None), PAGE_BYTES)
    for ids, salt, cached in (((1, 2, 3), "", 0), ((1, 2, 3), "", 2), ((1, 3, 3), "", 0), ((1, 2, 3), "salt", 0)):
        grant = pool.take(3, NAMING.names(ids, salt))
        assert grant is not None
        assert grant.cached_tokens == cached
        pool.publish(grant, 1)
        pool.give_back(grant)


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    """The least recently used prompt loses pages first, and a prompt loses its last page first."""
    pool = PrefixPool(4, SLOTS, PI, HostPool(0, lambda _: None), PAGE_BYTES)
    for ids in ((1, 1, 2, 2), (3, 3, 4, 4)):
        grant = pool.take(4, NAMING.names(ids, ""))
        assert grant is not None
        pool.publish(grant, 2)
        pool.give_back(grant)
    grant = pool.take(2)
    assert grant is not None
    assert pool.counts.evicted_pages == 1
    pool.give_back(grant)
    for begins, cached in (((3, 3, 4, 4), 4), ((1, 1, 2, 2), 2)):
        grant = pool.take(5, NAMING.names((*begins, 5), ""))
        assert grant is not None
        assert grant.cached_tokens == cached
        pool.give_back(grant)


def test_what_resume_points_are_kept_for() -> None:
    """With two slots, two conversations go on turn by turn. A beginning that many prompts share outlives their ends."""
    turns = [((who, *range(turn)), turn) for turn in range(5) for who in (8, 9)]
    system = [((0, 0, last), 2 * (last > 2)) for last in range(1, 6)]
    for prompts in (turns, system):
        points = ResumePoints[SharedPage](range(SLOTS, SLOTS + 2))
        pool = PrefixPool(50, SLOTS, PI, HostPool(0, lambda _: None), PAGE_BYTES, points=points)
        for pages, cached in prompts:
            grant = pool.take(PI * len(pages) + 1, NAMING.names([token for page in pages for token in [page] * PI], ""))
            assert grant is not None
            assert grant.cached_tokens == cached * PI, pages
            for end in sorted({grant.known_tokens // PI, len(pages)}):  # passes end where the known pages do
                pool.publish(grant, end)
                pool.moves()
            pool.give_back(grant)
