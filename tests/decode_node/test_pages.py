"""Pages and slots: no two grants share one, everything comes back, and a grant is given back only once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from decode_node.pages import Grant, PagePool

PAGES, SLOTS = 12, 4


class Pool(RuleBasedStateMachine):
    """Any sequence of takes and returns, including returns of grants that are not held."""

    held = Bundle("held")
    returned = Bundle("returned")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SLOTS)
        self.grants: list[Grant] = []

    @rule(target=held, count=st.integers(0, PAGES + 1))
    def take(self, count: int) -> object:
        """A grant is refused only when pages or slots are short, and then takes nothing."""
        room = count <= self.pool.free_pages and self.pool.free_slots > 0
        grant = self.pool.take(count)
        assert (grant is not None) == room
        if grant is None:
            return multiple()
        assert len(grant.pages) == count
        self.grants.append(grant)
        return grant

    @rule(target=returned, grant=consumes(held))
    def give_back(self, grant: Grant) -> Grant:
        """A held grant can be returned once."""
        self.pool.give_back(grant)
        self.grants = [other for other in self.grants if other is not grant]
        return grant

    @rule(target=held, grant=consumes(held), count=st.integers(0, PAGES))
    def extend(self, grant: Grant, count: int) -> Grant:
        """A grown grant has more pages after the old ones, in the same slot, and replaces the old grant. Without room
        nothing changes."""
        room = count <= self.pool.free_pages
        grown = self.pool.extend(grant, count)
        assert (grown is not None) == room
        if grown is None:
            return grant
        assert grown.slot == grant.slot
        assert grown.pages[: len(grant.pages)] == grant.pages
        assert len(grown.pages) == len(grant.pages) + count
        self.grants = [grown if other is grant else other for other in self.grants]
        with pytest.raises(ValueError, match="not held"):
            self.pool.give_back(grant)
        return grown

    @rule(grant=returned)
    def give_back_again(self, grant: Grant) -> None:
        """A second return is refused, even if the same pages and slot have a new holder."""
        with pytest.raises(ValueError, match="not held"):
            self.pool.give_back(grant)

    @invariant()
    def everything_has_one_owner(self) -> None:
        """Held and free pages add up to the pool, without overlap; so do slots."""
        pages = [page for grant in self.grants for page in grant.pages]
        slots = [grant.slot for grant in self.grants]
        assert len(set(pages)) == len(pages) == PAGES - self.pool.free_pages
        assert len(set(slots)) == len(slots) == SLOTS - self.pool.free_slots
        assert set(pages) <= set(range(PAGES))
        assert set(slots) <= set(range(SLOTS))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def test_low_numbers_go_first() -> None:
    pool = PagePool(4, 2)
    assert pool.take(2) == Grant((0, 1), 0)
    assert pool.take(2) == Grant((2, 3), 1)
    assert pool.take(0) is None
