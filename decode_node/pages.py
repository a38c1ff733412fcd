"""Pages and slots of a decode node as numbers, and the grants that hold them. No tensors.

The first pages of a sequence have names (`kept_pages.py`), and other sequences may hold them too. It owns all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from decode_node.kept_pages import Copy, KeptPage, KeptPages
from hackkv.page_names import PageName


class Grant(NamedTuple):
    """The pages that one sequence holds, as pool indices in order, and the slot of its open page."""

    pages: tuple[int, ...]
    slot: int
    held: int = 0
    """The number of first pages that contained the bytes of the prompt when the sequence came."""
    loads: tuple[Copy, ...] = ()
    """The copies from host memory that the first pages need before use."""


class PagePool:
    """Hands out pages and slots of a fixed pool. "No room" is a return value; giving back twice is an error."""

    def __init__(self, num_pages: int, num_slots: int, host_places: int = 0) -> None:
        """Host memory has room for copies of `host_places` pages."""
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.kept = KeptPages(host_places)
        # Numbers are popped from the end, so low ones come first.
        self._pages = list(reversed(range(num_pages)))
        self._slots = list(reversed(range(num_slots)))
        self._busy_slots: set[int] = set()
        """Slots that a copy reads. They are free when the copy is over."""
        self._held: dict[int, Grant] = {}
        self._named: dict[int, list[KeptPage]] = {}
        """Slot of a grant -> its first pages, which have names."""

    @property
    def free_pages(self) -> int:
        """Pages that no grant holds."""
        return len(self._pages) + self.kept.idle

    @property
    def empty_pages(self) -> int:
        """Free pages without a name, whose contents no prompt can use."""
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        """Slots that no grant holds."""
        return len(self._slots)

    @property
    def idle_slots(self) -> tuple[int, ...]:
        """The numbers of the free slots."""
        return tuple(self._slots)

    def taken_by(self, num_pages: int, names: Sequence[PageName] = ()) -> int:
        """The number of free pages that `take` would take. Pages that others hold already cost none."""
        return num_pages - sum(kept.users > 0 for kept in self.kept.match(names[:num_pages]))

    def take(self, num_pages: int, names: Sequence[PageName] = ()) -> Grant | None:
        """Take pages and one slot; None if either is short. The first pages are the longest known prefix of `names`."""
        found = self.kept.match(names[:num_pages])
        fresh = num_pages - sum(kept.users > 0 for kept in found)
        if fresh > self.free_pages or not self._slots:
            return None
        for kept in found:
            self.kept.hold(kept)
        loads = tuple(self.kept.load(kept, self._new_page()) for kept in found if kept.page is None)
        here = [kept.page for kept in found if kept.page is not None]
        pages = (*here, *(self._new_page() for _ in range(num_pages - len(here))))
        grant = Grant(pages, self._slots.pop(), len(found), loads)
        self._held[grant.slot] = grant
        self._named[grant.slot] = found
        self.kept.count(len(names), len(found))
        return grant

    def extend(self, grant: Grant, num_pages: int) -> Grant | None:
        """Return a grant with `num_pages` more pages, which replaces `grant`; None if the pages are not free.

        Raises `ValueError` when `grant` is not held.
        """
        self._check_held(grant)
        if num_pages > self.free_pages:
            return None
        return self._replace(grant, (*grant.pages, *(self._new_page() for _ in range(num_pages))))

    def publish(self, grant: Grant, names: Sequence[PageName]) -> Grant:
        """Name the first pages of `grant`. They must be sealed, and no step may be reading them.

        Returns the grant that replaces `grant`. If a kept page has a name already, and so the same bytes, the new grant
        holds that page, and the duplicate becomes free. Raises `ValueError` when `grant` is not held.
        """
        self._check_held(grant)
        named, pages = self._named[grant.slot], list(grant.pages)
        for index in range(len(named), min(len(names), len(pages))):
            kept = self.kept.name(names[index], named[-1] if named else None, pages[index])
            if kept is None:
                break
            assert kept.page is not None
            self.kept.hold(kept)
            named.append(kept)
            if kept.page != pages[index]:
                self._pages.append(pages[index])
                pages[index] = kept.page
        return grant if tuple(pages) == grant.pages else self._replace(grant, tuple(pages))

    def give_back(self, grant: Grant) -> None:
        """Free a grant's pages and slot. Raises `ValueError` when it is not held, even if its slot has a new holder."""
        self._check_held(grant)
        del self._held[grant.slot]
        named = self._named.pop(grant.slot)
        self._pages.extend(reversed(grant.pages[len(named) :]))
        self._let_go(reversed(named))  # so that the beginning of a prefix is the last to be evicted
        if grant.slot not in self._busy_slots:
            self._slots.append(grant.slot)

    def keep_slot(self, grant: Grant) -> None:
        """Give the slot of `grant` to no other grant until `free_slot`. Raises `ValueError` when it is not held."""
        self._check_held(grant)
        self._busy_slots.add(grant.slot)

    def free_slot(self, slot: int) -> None:
        """End `keep_slot`: the slot is free, unless a grant still holds it."""
        self._busy_slots.remove(slot)
        if slot not in self._held:
            self._slots.append(slot)

    def freed_by(self, grants: Iterable[Grant]) -> int:
        """The number of pages that become free when all of `grants` are given back."""
        leaving, private = Counter[KeptPage](), 0
        for grant in grants:
            named = self._named[grant.slot]
            private += len(grant.pages) - len(named)
            leaving.update(named)
        return private + sum(kept.users == count for kept, count in leaving.items())

    def forget(self) -> None:
        """Drop all names, because the contents of pages are in doubt. Sequences keep their pages."""
        self._pages.extend(self.kept.forget())

    def _let_go(self, pages: Iterable[KeptPage]) -> None:
        for kept in pages:
            freed = self.kept.let_go(kept)
            if freed is not None:
                self._pages.append(freed)

    def _new_page(self) -> int:
        return self._pages.pop() if self._pages else self.kept.evict()

    def _replace(self, grant: Grant, pages: tuple[int, ...]) -> Grant:
        renewed = self._held[grant.slot] = grant._replace(pages=pages)
        return renewed

    def _check_held(self, grant: Grant) -> None:
        if self._held.get(grant.slot) is not grant:
            raise ValueError(f"the grant of slot {grant.slot} is not held")
