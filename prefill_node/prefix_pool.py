"""Pages and slots of a prefill node as numbers: which prompts hold them, and which pages later prompts can share.

    free ──take──▶ private ──publish──▶ shared ──give back──▶ idle ──evict──▶ in host memory ──▶ dropped
     ▲                │                   ▲                    │                  │
     └────give back───┘                   └────────take────────┴──────────────────┘

A page is published when a pass has sealed it. A prompt that starts while another one computes the same prefix shares
the pages that are sealed by then and computes the rest itself. The prompt that seals a page second drops its own copy.
Idle pages are evicted when pages run short: least recently used first, and the end of a prefix before its beginning.
Their compressed planes go to host memory if it has room. There are no tensors here: `Moves` tells the engine what to
copy before a pass. If queries see some pages exactly, prompts share pages up to a resume point (`resume_points.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from hackkv.page_names import PageName
from prefill_node.fetched import Fetched
from prefill_node.host_places import HostPlaces, Moves
from prefill_node.host_pool import Claim, HostPool, Tenant
from prefill_node.resume_points import ResumePoints, Source


@dataclass(eq=False, slots=True)
class SharedPage:
    """A sealed page that has a name."""

    name: PageName
    parent: SharedPage | None
    page: int | None
    """Its index in the page pool; None while the page is in host memory."""
    users: int = 0
    """Prompts that hold it."""
    followers: int = 0
    """Number of known pages that follow this one in some prompt: two or more where prompts part."""
    claim: Claim | None = None
    """Its bytes of host memory."""
    place: int | None = None
    """Its place in host memory; None while it has none there."""


@dataclass(eq=False, slots=True)
class PrefixGrant:
    """The pages that one prompt holds, as pool indices in order, and the slot of its open page."""

    pages: list[int]
    slot: int
    names: Sequence[PageName]
    shared: list[SharedPage]
    """The prompt's first pages: those that are published or were shared from the start."""
    cached_tokens: int
    """Tokens that the prompt need not compute."""
    known_tokens: int
    """Tokens of the pages that were known at the start: the shared ones, and more if a resume point was missing."""
    publishes: bool
    held: bool = True


class Beginning(NamedTuple):
    """The first pages of a prompt, which it need not compute."""

    known: list[SharedPage]
    """The longest known prefix."""
    shared: list[SharedPage]
    """The part of the known prefix that the prompt takes over."""
    fetched: Fetched | None
    """Pages from a decode node that follow the shared ones; None if the prompt goes on after the shared pages."""


@dataclass(slots=True)
class PrefixCounts:
    """Counts of prefix lookups and evictions so far."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    """Pages that left the page pool, for host memory or for good."""


class PrefixPool:
    """Hands out pages and slots of a fixed pool. "No room" is a return value; giving back twice is an error."""

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        page_tokens: int,
        host: HostPool,
        page_bytes: int,
        *,
        reuse: bool = True,
        points: ResumePoints[SharedPage] | None = None,
    ) -> None:
        """`page_bytes` is the size of a page in host memory; `reuse` False keeps no page beyond its prompt.

        With `points` a prompt takes over pages only up to one whose exact rows `points` keeps. Without `points` it
        needs no exact rows.
        """
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.counts = PrefixCounts()
        self._host, self._page_bytes, self.reuse = host, page_bytes, reuse
        # Numbers are popped from the end, so low ones come first.
        self._pages = list(reversed(range(num_pages)))
        self._slots = list(reversed(range(num_slots)))
        self._known: dict[bytes, SharedPage] = {}
        self._idle: dict[SharedPage, None] = {}
        self._points = points
        self.places = HostPlaces(host.capacity_bytes // page_bytes if reuse else 0)

    @property
    def free_pages(self) -> int:
        """Pages that no prompt holds."""
        return len(self._pages) + len(self._idle)

    @property
    def idle_slots(self) -> tuple[int, ...]:
        """Slots that no prompt holds and from which the next pass does not copy."""
        copied = self._points.copied if self._points is not None else frozenset[int]()
        return tuple(slot for slot in self._slots if slot not in copied)

    @property
    def known_pages(self) -> tuple[int, int]:
        """Numbers of pages with a name, in the page pool and in host memory."""
        here = sum(shared.page is not None for shared in self._known.values())
        return here, len(self._known) - here

    def digests(self) -> Iterator[bytes]:
        """The digests of the pages after which a prompt can go on: held pages first, then idle pages, those that would
        be evicted last before others, then pages in host memory."""
        held = (shared for shared in self._known.values() if shared.users)
        stored = (shared for shared in self._known.values() if shared.page is None)
        pages = chain(held, reversed(self._idle), stored)
        return (shared.name.digest for shared in pages if self._points is None or shared in self._points)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens need, including the open one."""
        return -(-num_tokens // self.page_tokens)

    def has_room(self, num_tokens: int, names: Sequence[PageName] = ()) -> bool:
        """Whether `take` would succeed."""
        num_pages = self.pages_for(num_tokens)
        found = self.beginning(names[: num_pages - 1]).shared
        here = sum(shared.page is not None for shared in found)
        idle = sum(shared in self._idle for shared in found)
        return num_pages - here <= self.free_pages - idle and bool(self._slots)

    def take(self, num_tokens: int, names: Sequence[PageName] = (), *, hit: bool = True) -> PrefixGrant | None:
        """Take one slot and all pages of a prompt whose full pages are `names`; None if either is short.

        The longest known prefix that leaves at least one token to compute is shared; `hit` False shares nothing.
        """
        num_pages = self.pages_for(num_tokens)
        wanted = names[: num_pages - 1] if hit else ()
        if not self.has_room(num_tokens, wanted):
            return None
        known, found, fetched = self.beginning(wanted)
        for shared in found:
            shared.users += 1
            self._idle.pop(shared, None)
            self._give_up_claim(shared)
        pages = []
        for shared in found:
            if shared.page is None:
                shared.page = self._new_page()
                assert shared.place is not None
                self.places.load(shared.place, shared.page)
                shared.place = None
            pages.append(shared.page)
        pages += [self._new_page() for _ in range(num_pages - len(pages))]
        cached_tokens, slot = len(found) * self.page_tokens, self._slots.pop()
        if hit and self.reuse:
            self.counts.queried_tokens += num_tokens
            self.counts.hit_tokens += cached_tokens
        if fetched is not None:
            cached_tokens = fetched.end * self.page_tokens
            self.places.install(fetched.into(tuple(pages), slot, len(found), cached_tokens))
        elif found and self._points is not None:
            self._points.resume(found[-1], len(found), slot)
        known_tokens = len(known) * self.page_tokens
        return PrefixGrant(pages, slot, names, found, cached_tokens, known_tokens, publishes=self.reuse)

    def publish(self, grant: PrefixGrant, num_pages: int) -> None:
        """Name those of a prompt's first `num_pages` pages, which are sealed, that have no name yet.

        The slot of the prompt must hold the exact rows that the next page needs.
        """
        self._name(grant, num_pages)
        if self._points is not None and num_pages and len(grant.shared) == num_pages:
            last, before = grant.shared[-1], grant.shared[-1].parent
            while before is not None and before not in self._points:
                before = before.parent
            if before is not None and before.followers < 2:
                self._points.leave_behind(before)
            self._points.keep(last, Source(grant.slot, num_pages))

    def _name(self, grant: PrefixGrant, num_pages: int) -> None:
        while grant.publishes and len(grant.shared) < min(num_pages, len(grant.names)):
            index = len(grant.shared)
            parent = grant.shared[-1] if grant.shared else None
            name, page = grant.names[index], grant.pages[index]
            known = self._known.get(name.digest)
            if known is not None and known.name != name:
                grant.publishes = False  # two names with one digest: the first one stays
                return
            if known is not None and known.parent is not parent:
                self._drop(known)  # its parent was dropped earlier, so no lookup reaches it any more
                known = None
            if known is None:
                known = self._known[name.digest] = SharedPage(name, parent, page)
                if parent is not None:
                    parent.followers += 1
            elif known.page is None:
                self._leave_host(known)
                known.page = page
            else:
                self._pages.append(page)
                grant.pages[index] = known.page
                self._idle.pop(known, None)
            known.users += 1
            grant.shared.append(known)

    def give_back(self, grant: PrefixGrant) -> None:
        """Return all pages and the slot. Raises `ValueError` when the grant is not held."""
        if not grant.held:
            raise ValueError(f"the grant of slot {grant.slot} is not held")
        grant.held = False
        self._slots.append(grant.slot)
        self._pages.extend(reversed(grant.pages[len(grant.shared) :]))
        for shared in reversed(grant.shared):  # so that the beginning of a prefix is the last to be evicted
            shared.users -= 1
            if shared.users:
                continue
            if self._known.get(shared.name.digest) is shared:
                self._idle[shared] = None
            elif shared.page is not None:
                self._pages.append(shared.page)

    def forget(self) -> None:
        """Drop every name and planned copy, because the contents of pages are in doubt. Prompts keep their pages."""
        for shared in tuple(self._known.values()):
            self._drop(shared)
        self.moves()

    def moves(self) -> Moves:
        """Take the copies that are due before the next pass; they are given once."""
        moves = self.places.take_moves()
        return moves if self._points is None else replace(moves, slots=self._points.take_moves())

    def match(self, names: Sequence[PageName]) -> list[SharedPage]:
        """The pages of the longest known prefix of `names`."""
        found: list[SharedPage] = []
        for name in names:
            shared = self._known.get(name.digest)
            parent = found[-1] if found else None
            if shared is None or shared.name != name or shared.parent is not parent:
                break
            found.append(shared)
        return found

    def beginning(self, names: Sequence[PageName]) -> Beginning:
        """The pages that exist of a prompt whose full pages are `names`."""
        known = self.match(names)
        count = len(known)
        while count and self._points is not None and known[count - 1] not in self._points:
            count -= 1
        fetched = self.places.fetched(names, len(known))
        if fetched is None or fetched.end <= count:
            return Beginning(known, known[:count], None)
        return Beginning(known, known[: fetched.end], fetched)

    def _new_page(self) -> int:
        """A free page. If there is none, the least recently used idle page is evicted."""
        if self._pages:
            return self._pages.pop()
        shared = next(iter(self._idle))
        del self._idle[shared]
        page, shared.page = shared.page, None
        assert page is not None
        self.counts.evicted_pages += 1
        shared.claim = self._host.claim(Tenant.PREFIX, self._page_bytes, partial(self._pushed_out, shared))
        # A page that will be loaded gives back its bytes at once, but its place only when the pass takes the moves. So
        # there may be free bytes and no free place.
        if shared.claim is not None:
            shared.place = self.places.save(page)
        if shared.place is None:
            self._drop(shared)
        return page

    def _leave_host(self, shared: SharedPage) -> None:
        self._give_up_claim(shared)
        if shared.place is not None:
            self.places.give_back(shared.place)
            shared.place = None

    def _give_up_claim(self, shared: SharedPage) -> None:
        if shared.claim is not None:
            self._host.release(shared.claim)
            shared.claim = None

    def _pushed_out(self, shared: SharedPage) -> None:
        shared.claim = None
        self._drop(shared)

    def _drop(self, shared: SharedPage) -> None:
        """Forget a page's name and its copy in host memory. The page itself is free unless a prompt holds it."""
        self._known.pop(shared.name.digest, None)
        if shared.parent is not None:
            shared.parent.followers -= 1
        if self._points is not None:
            self._points.drop(shared)
        self._leave_host(shared)
        if shared in self._idle:
            del self._idle[shared]
            assert shared.page is not None
            self._pages.append(shared.page)
