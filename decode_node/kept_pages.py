"""Sealed pages with names: which are held, which are idle, and which have a copy in host memory. Numbers only.

    private ──name──▶ held ──last holder gone──▶ idle ──evict──▶ in host memory ──▶ dropped
                       ▲ ▲                         │                  │
                       │ └─────────hold────────────┘                  │
                       └────────────────hold, and a load──────────────┘

An idle page can be taken at once, so it counts as free. So copies must be made before pages run short: `to_save` lists
pages without a copy that are evicted next. A page that is taken before it has a copy is dropped. If it is taken while
the copy is being made, the copy is thrown away. The least recently used page is evicted first, and the end of a prefix
before its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from hackkv.page_names import PageName


@dataclass(eq=False, slots=True)
class KeptPage:
    """A sealed page that has a name."""

    name: PageName
    parent: KeptPage | None
    page: int | None
    """Its index in the page pool; None while the page is only in host memory."""
    users: int = 0
    """Sequences that hold it."""
    place: int | None = None
    """Its place in host memory; None while it has no copy there."""
    loading: bool = False
    """Whether its copy is on the way to `page`. Until then no other sequence can hold the page."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A page that moves to host memory, or back."""

    kept: KeptPage
    page: int
    place: int


@dataclass(slots=True)
class KeptCounts:
    """Counts of lookups and evictions so far."""

    queried_pages: int = 0
    hit_pages: int = 0
    evicted_pages: int = 0
    """Pages that left the page pool, for host memory or for good."""


class KeptPages:
    """Every page that has a name. Part of a `PagePool`, which hands out the pages' indices."""

    def __init__(self, host_places: int) -> None:
        """`host_places` pages fit into host memory."""
        self.host_places = host_places
        self.counts = KeptCounts()
        self._known: dict[bytes, KeptPage] = {}
        self._idle: dict[KeptPage, None] = {}
        # Numbers are popped from the end, so low ones come first.
        self._places = list(reversed(range(host_places)))
        self._copied: dict[KeptPage, None] = {}
        """Pages with a copy in host memory, the oldest copy first."""
        self._saving: dict[KeptPage, int] = {}
        """Pages whose copy is being made -> the index that is copied."""

    @property
    def idle(self) -> int:
        """The number of pages in the pool that have a name and that no sequence holds."""
        return len(self._idle)

    @property
    def known(self) -> tuple[int, int]:
        """Numbers of pages with a name, in the page pool and in host memory. A page in both counts in both."""
        stored = sum(kept.page is None for kept in self._copied)
        return len(self._known) - stored, len(self._copied)

    def digests(self) -> Iterator[bytes]:
        """The digests of all pages: held pages first, then idle pages, then pages in host memory, each of the latter
        two in the reverse order of eviction."""
        held = (kept for kept in self._known.values() if kept.users)
        stored = (kept for kept in reversed(self._copied) if kept.page is None)
        return (kept.name.digest for kept in chain(held, reversed(self._idle), stored))

    # Lookup ---------------------------------------------------------------------------------------------------------

    def match(self, names: Sequence[PageName]) -> list[KeptPage]:
        """The pages of the longest known prefix of `names` that can be held now."""
        found: list[KeptPage] = []
        for name in names:
            kept = self._known.get(name.digest)
            parent = found[-1] if found else None
            if kept is None or kept.name != name or kept.parent is not parent or kept.loading:
                break
            found.append(kept)
        return found

    def count(self, queried: int, found: int) -> None:
        """Count a sequence that asked for `queried` pages and holds `found` of them."""
        self.counts.queried_pages += queried
        self.counts.hit_pages += found

    def hold(self, kept: KeptPage) -> None:
        """Add a holder to a page."""
        kept.users += 1
        self._idle.pop(kept, None)

    def let_go(self, kept: KeptPage) -> int | None:
        """Remove a holder of a page. Returns the page's index if it is free now: the page has no holder and no name."""
        kept.users -= 1
        if kept.users:
            return None
        if self._is_known(kept):
            self._idle[kept] = None
            return None
        return kept.page

    def name(self, name: PageName, parent: KeptPage | None, page: int) -> KeptPage | None:
        """Name a sealed page. Returns the page of that name, which may be another one with the same bytes.

        Returns None if the page cannot have the name: another page has its digest, or is being loaded under it.
        """
        known = self._known.get(name.digest)
        if known is not None and known.name == name and known.parent is not parent:
            if known.users:
                return None
            self._forget(known)  # its parent is gone, so no lookup reaches it any more
            known = None
        if known is None:
            known = self._known[name.digest] = KeptPage(name, parent, page)
        elif known.name != name or known.loading:
            return None
        elif known.page is None:
            known.page = page
        return known

    # Eviction -------------------------------------------------------------------------------------------------------

    def evict(self) -> int:
        """Take the least recently used idle page out of the pool; return its index."""
        kept = next(iter(self._idle))
        del self._idle[kept]
        page, kept.page = kept.page, None
        assert page is not None
        self.counts.evicted_pages += 1
        if kept.place is None and self._is_known(kept):
            del self._known[kept.name.digest]
        return page

    def to_save(self, most: int) -> list[Copy]:
        """At most `most` copies to make, of the pages that are evicted next and have no copy. `saved` must follow.

        Copies are made in the order of eviction, for no more pages than host memory holds.
        """
        going = list(islice(self._idle, self.host_places))
        copies: list[Copy] = []
        for kept in going:
            if len(copies) == most:
                break
            if kept.place is None and kept not in self._saving and self._is_known(kept):
                place = self._new_place(going)
                if place is None:
                    break
                assert kept.page is not None
                self._saving[kept] = kept.page
                copies.append(Copy(kept, kept.page, place))
        return copies

    def saved(self, copies: Iterable[Copy], *, worked: bool = True) -> None:
        """Note that copies are made. A copy whose page left the pool meanwhile is dropped: its bytes may be wrong."""
        for copy in copies:
            del self._saving[copy.kept]
            if worked and self._is_known(copy.kept) and copy.kept.page == copy.page and copy.kept.place is None:
                copy.kept.place = copy.place
                self._copied[copy.kept] = None
            else:
                self._places.append(copy.place)

    def load(self, kept: KeptPage, page: int) -> Copy:
        """Begin to bring a held page back to index `page` of the pool. `loaded` must follow."""
        assert kept.place is not None
        kept.page, kept.loading = page, True
        return Copy(kept, page, kept.place)

    def loaded(self, copies: Iterable[Copy], *, worked: bool = True) -> None:
        """Note that loads are over. If they failed (not `worked`), the pages lose their names."""
        for copy in copies:
            copy.kept.loading = False
            if not worked and self._is_known(copy.kept):
                del self._known[copy.kept.name.digest]
            if not self._is_known(copy.kept):
                self._give_up_place(copy.kept)

    def forget(self) -> list[int]:
        """Drop every name, because the contents of pages are in doubt. Returns the pages that are free now."""
        idle = [kept.page for kept in self._idle if kept.page is not None]
        self._idle.clear()
        self._known.clear()
        for kept in [kept for kept in self._copied if not kept.loading]:
            self._give_up_place(kept)
        return idle

    def _is_known(self, kept: KeptPage) -> bool:
        return self._known.get(kept.name.digest) is kept

    def _new_place(self, going: Sequence[KeptPage]) -> int | None:
        """A place in host memory. If none is free, drops the oldest copy of a page that is not in `going`."""
        if not self._places:
            spared = set(going)
            oldest = next((kept for kept in self._copied if kept not in spared and not kept.loading), None)
            if oldest is None:
                return None
            self._give_up_place(oldest)
            if oldest.page is None:
                del self._known[oldest.name.digest]
        return self._places.pop()

    def _give_up_place(self, kept: KeptPage) -> None:
        if kept.place is not None:
            self._places.append(kept.place)
            kept.place = None
            del self._copied[kept]

    def _forget(self, kept: KeptPage) -> None:
        """Forget a page without a holder. If it is in the pool, the caller gives its name to another page, and it stays
        idle until it is evicted."""
        self._give_up_place(kept)
        if kept.page is None:
            del self._known[kept.name.digest]
