"""Pages that outlive their sequences: a held page always has the bytes that its name stands for, whatever moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_node.kept_pages import Copy, KeptPages
from decode_node.pages import Grant, PagePool
from hackkv import page_names as naming
from hackkv.page_names import Naming, PageName
from hackkv.types import Fingerprint

PI = 2
NAMING = Naming(PI, Fingerprint((("codec", "hack"),)))
LONGEST = 4

prompts = st.builds(
    lambda pages, count: tuple(token for page in pages[:count] for token in (page, page)),
    st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1)]),
    st.integers(0, LONGEST),
)
"""Token ids that often begin alike."""


@dataclass(eq=False)
class Sequence:
    """A sequence that holds a grant; the first `sealed` pages are written."""

    ids: tuple[int, ...]
    salt: str
    grant: Grant
    sealed: int
    loading: bool
    gone: bool = False

    @property
    def names(self) -> tuple[PageName, ...]:
        return NAMING.names(self.ids, self.salt)

    def content(self, index: int) -> object:
        """Everything that the bytes of page `index` depend on."""
        return (self.salt, self.ids[: (index + 1) * PI])


class Keeping(RuleBasedStateMachine):
    """Sequences come, seal, publish and leave in any order, beside copies of any duration. `device` and `memory` model
    the contents of the page pool and of host memory."""

    @initialize(pages=st.integers(1, 8), slots=st.integers(1, 4), places=st.integers(0, 5))
    def start(self, pages: int, slots: int, places: int) -> None:
        """A node of any size."""
        self.pool = PagePool(pages, slots, places)
        self.device: dict[int, object] = {}
        self.memory: dict[int, object] = {}
        self.sequences: list[Sequence] = []
        self.saves: list[list[Copy]] = []
        self.torn: dict[int, object] = {}
        """Page -> the content that a copy under way reads; None if the page is written meanwhile."""

    def write(self, page: int, content: object) -> None:
        """Write new content to a page."""
        self.device[page] = content
        self.torn[page] = None

    @rule(ids=prompts, salt=st.sampled_from(["", "salt"]), more=st.integers(0, 2))
    def come(self, ids: tuple[int, ...], salt: str, more: int) -> None:
        """A grant is refused only when pages or slots are short, and then nothing changes. Held pages have the right
        content."""
        names = NAMING.names(ids, salt)
        free, count = self.pool.free_pages, len(names) + more
        cost = self.pool.taken_by(count, names)
        grant = self.pool.take(count, names)
        assert (grant is not None) == (cost <= free and len(self.sequences) < self.pool.num_slots)
        if grant is None:
            assert self.pool.free_pages == free
            return
        assert len(grant.pages) == count
        assert self.pool.free_pages == free - cost
        sequence = Sequence(ids, salt, grant, grant.held, bool(grant.loads))
        coming = {copy.page for copy in grant.loads}
        for index, page in enumerate(grant.pages[: grant.held]):
            assert page in coming or self.device[page] == sequence.content(index)
        self.sequences.append(sequence)

    @precondition(lambda self: any(sequence.loading for sequence in self.sequences))
    @rule(data=st.data(), works=st.booleans())
    def end_load(self, data: st.DataObject, works: bool) -> None:
        """A load ends. If it failed, the pages lose their names and the sequence ends."""
        sequence = data.draw(st.sampled_from([one for one in self.sequences if one.loading]))
        for copy in sequence.grant.loads:
            self.write(copy.page, self.memory[copy.place] if works else "garbage")
        self.pool.kept.loaded(sequence.grant.loads, worked=works)
        sequence.loading = False
        if sequence.gone or not works:
            self.end(sequence)

    @precondition(lambda self: any(not sequence.loading for sequence in self.sequences))
    @rule(data=st.data(), count=st.integers(0, LONGEST))
    def seal_and_publish(self, data: st.DataObject, count: int) -> None:
        """A sequence writes only pages that it owns. A duplicate of a named page is given back."""
        sequence = data.draw(st.sampled_from([one for one in self.sequences if not one.loading]))
        names = sequence.names[: max(count, sequence.sealed)]
        for index in range(sequence.sealed, len(names)):
            self.write(sequence.grant.pages[index], sequence.content(index))
        sequence.sealed = len(names)
        sequence.grant = self.pool.publish(sequence.grant, names)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A sequence that leaves during a load keeps its pages until the load is over."""
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.loading:
            sequence.gone = True
        else:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Give the grant back."""
        self.sequences.remove(sequence)
        others = [one.grant for one in self.sequences]
        free, freed = self.pool.free_pages, self.pool.freed_by([sequence.grant])
        everybody = self.pool.freed_by([sequence.grant, *others])
        self.pool.give_back(sequence.grant)
        assert self.pool.free_pages == free + freed
        assert self.pool.freed_by(others) == everybody - freed

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """A sequence takes one page more, if there is one."""
        if not self.sequences:
            return
        sequence = data.draw(st.sampled_from(self.sequences))
        room = self.pool.free_pages > 0
        grown = self.pool.extend(sequence.grant, 1)
        assert (grown is not None) == room
        sequence.grant = grown or sequence.grant

    @rule(most=st.integers(1, 8))
    def begin_save(self, most: int) -> None:
        """Each page is copied to a place of its own, once."""
        copies = self.pool.kept.to_save(most)
        assert len(copies) <= most
        for copy in copies:
            self.torn[copy.page] = self.device[copy.page]
        places = [copy.place for batch in (*self.saves, copies) for copy in batch]
        assert len(set(places)) == len(places)
        if copies:
            self.saves.append(copies)

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), works=st.booleans())
    def end_save(self, data: st.DataObject, works: bool) -> None:
        """The copy of a page that was written meanwhile is garbage, which no sequence may get."""
        copies = self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1)))
        for copy in copies:
            self.memory[copy.place] = self.torn.get(copy.page) if works else None
        self.pool.kept.saved(copies, worked=works)

    @rule()
    def forget(self) -> None:
        """All names are dropped."""
        self.pool.forget()
        assert self.pool.kept.known == (0, 0)

    @invariant()
    def everything_has_an_owner(self) -> None:
        """Every page is free or held, and shared only by sequences that need the same content."""
        if not hasattr(self, "pool"):
            return
        held: dict[int, object] = {}
        for sequence in self.sequences:
            assert len(set(sequence.grant.pages)) == len(sequence.grant.pages)
            for index, page in enumerate(sequence.grant.pages):
                meaning = sequence.content(index) if index < sequence.sealed else sequence
                assert held.setdefault(page, meaning) == meaning
                if index < sequence.sealed and not sequence.loading:
                    assert self.device[page] == meaning
        assert len(held) == self.pool.num_pages - self.pool.free_pages
        assert len(self.sequences) == self.pool.num_slots - self.pool.free_slots
        digests = list(self.pool.kept.digests())
        assert len(set(digests)) == len(digests) >= max(self.pool.kept.known)

    def teardown(self) -> None:
        """In the end every page can be taken."""
        if not hasattr(self, "pool"):
            return
        for sequence in list(self.sequences):
            if sequence.loading:
                self.pool.kept.loaded(sequence.grant.loads)
            self.end(sequence)
        grant = self.pool.take(self.pool.num_pages)
        assert grant is not None
        assert sorted(grant.pages) == list(range(self.pool.num_pages))
        for batch in self.saves:
            self.pool.kept.saved(batch)
        places = {copy.place for copy in self.pool.kept.to_save(8)}
        assert not places, "nothing is idle"


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=150, stateful_step_count=40)


def fill(pool: PagePool, ids: tuple[int, ...]) -> None:
    """Let a sequence come, seal all its pages and leave."""
    names = NAMING.names(ids, "")
    grant = pool.take(len(names), names)
    assert grant is not None
    pool.give_back(pool.publish(grant, names))


def save(kept: KeptPages, most: int) -> int:
    """Copy pages at once; return their number."""
    copies = kept.to_save(most)
    kept.saved(copies)
    return len(copies)


def held(pool: PagePool, ids: tuple[int, ...]) -> int:
    """The number of a prompt's pages that the pool has."""
    return len(pool.kept.match(NAMING.names(ids, "")))


def test_the_beginning_of_a_prefix_outlives_its_end_and_the_least_recently_used_goes_first() -> None:
    pool = PagePool(4, 1)
    old, new = (1, 1, 2, 2), (3, 3, 4, 4)
    fill(pool, old)
    fill(pool, new)
    taken = pool.take(1)
    assert taken is not None
    assert (held(pool, old), held(pool, new), pool.kept.counts.evicted_pages) == (1, 2, 1)


def test_pages_with_a_copy_survive_their_eviction() -> None:
    pool = PagePool(2, 1, host_places=2)
    ids = (1, 1, 2, 2)
    fill(pool, ids)
    assert save(pool.kept, 2) == 2
    assert save(pool.kept, 2) == 0
    taken = pool.take(2)
    assert taken is not None
    assert pool.kept.known == (0, 2)
    pool.give_back(taken)
    back = pool.take(2, NAMING.names(ids, ""))
    assert back is not None
    assert (back.held, len(back.loads)) == (2, 2)
    assert held(pool, ids) == 0, "nobody else holds a page before it is back"
    pool.kept.loaded(back.loads)
    assert held(pool, ids) == 2


def test_a_copy_of_a_page_that_was_taken_meanwhile_is_thrown_away() -> None:
    pool = PagePool(1, 1, host_places=1)
    fill(pool, (1, 1))
    copies = pool.kept.to_save(1)
    assert len(copies) == 1
    assert pool.take(1) is not None
    pool.kept.saved(copies)
    assert pool.kept.known == (0, 0)


def test_when_host_memory_is_full_the_oldest_copy_goes() -> None:
    pool = PagePool(2, 1, host_places=1)
    for ids in ((1, 1), (2, 2)):
        fill(pool, ids)
        assert save(pool.kept, 1) == 1
        taken = pool.take(2)
        assert taken is not None
        pool.give_back(taken)
    assert (held(pool, (1, 1)), held(pool, (2, 2))) == (0, 1)


def test_digests_that_collide_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of every prompt has the same digest here; still no sequence gets the pages of another."""
    monkeypatch.setattr(naming, "_digest", lambda _: b"same")
    pool = PagePool(4, 1)
    for ids, salt, shared in (((1, 2), "", 0), ((1, 2), "", 1), ((1, 3), "", 0), ((1, 2), "salt", 0)):
        names = NAMING.names(ids, salt)
        grant = pool.take(1, names)
        assert grant is not None
        assert grant.held == shared
        pool.give_back(pool.publish(grant, names))
