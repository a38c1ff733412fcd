"""Page books that count instead of naming pages: the same answers as the live ones, faster.

The live pools hand out page numbers, since kernels need them. No decision depends on the numbers, so a simulation
without shared prefixes counts. `tests/sim/test_books.py` holds both kinds against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode_node.pages import Grant, PagePool
from hackkv.page_names import PageName
from prefill_node.host_pool import HostPool
from prefill_node.prefix_pool import PrefixGrant, PrefixPool


class CountedPages(PagePool):
    """A `PagePool` that counts pages: every page number in a grant is 0."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        super().__init__(0, num_slots)
        self.num_pages = num_pages
        self._free = num_pages

    @property
    def free_pages(self) -> int:
        """Pages that no grant holds."""
        return self._free

    def taken_by(self, num_pages: int, names: Sequence[PageName] = ()) -> int:
        """See `PagePool`; nothing is shared."""
        return num_pages

    def take(self, num_pages: int, names: Sequence[PageName] = ()) -> Grant | None:
        """See `PagePool`; nothing is shared."""
        if num_pages > self._free or not self._slots:
            return None
        self._free -= num_pages
        grant = Grant((0,) * num_pages, self._slots.pop())
        self._held[grant.slot] = grant
        return grant

    def extend(self, grant: Grant, num_pages: int) -> Grant | None:
        """See `PagePool`."""
        self._check_held(grant)
        if num_pages > self._free:
            return None
        self._free -= num_pages
        grown = Grant(grant.pages + (0,) * num_pages, grant.slot)
        self._held[grant.slot] = grown
        return grown

    def freed_by(self, grants: Iterable[Grant]) -> int:
        """See `PagePool`."""
        return sum(len(grant.pages) for grant in grants)

    def give_back(self, grant: Grant) -> None:
        """See `PagePool`."""
        self._check_held(grant)
        del self._held[grant.slot]
        self._free += len(grant.pages)
        self._slots.append(grant.slot)


class CountedPrefixes(PrefixPool):
    """A `PrefixPool` that counts pages and keeps none after its prompt is over."""

    def __init__(self, num_pages: int, num_slots: int, page_tokens: int, host: HostPool, page_bytes: int) -> None:
        super().__init__(0, num_slots, page_tokens, host, page_bytes, reuse=False)
        self.num_pages = num_pages
        self._free = num_pages

    @property
    def free_pages(self) -> int:
        """Pages that no prompt holds."""
        return self._free

    def has_room(self, num_tokens: int, names: Sequence[PageName] = ()) -> bool:
        """Whether `take` would succeed."""
        return self.pages_for(num_tokens) <= self._free and bool(self._slots)

    def take(self, num_tokens: int, names: Sequence[PageName] = (), *, hit: bool = True) -> PrefixGrant | None:
        """See `PrefixPool`."""
        num_pages = self.pages_for(num_tokens)
        if num_pages > self._free or not self._slots:
            return None
        self._free -= num_pages
        return PrefixGrant([0] * num_pages, self._slots.pop(), (), [], 0, 0, publishes=False)

    def publish(self, grant: PrefixGrant, num_pages: int) -> None:
        """See `PrefixPool`; nothing gets a name."""

    def give_back(self, grant: PrefixGrant) -> None:
        """See `PrefixPool`."""
        if not grant.held:
            raise ValueError(f"the grant of slot {grant.slot} is not held")
        grant.held = False
        self._slots.append(grant.slot)
        self._free += len(grant.pages)
