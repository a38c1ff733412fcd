"""Decides between two steps which sequences run, take more pages or wait in host memory. Numbers only, no tensors.

A sequence takes pages as it seals them. It is in a step only if it holds the pages that the step needs. When pages run
short, victims (`decode_node.policy`) move to host memory. They come back oldest first, and nothing is computed twice.

**Hysteresis.** The step in which a sequence needs its next page is known: the one that fills its last page. A victim
leaves when the batch would run out of pages within `LOW_PAGES` times the steps of a page. That is early enough for its
copy to run beside those steps. A sequence is admitted or brought back only if all sequences on the device can then go
on for `HIGH_PAGES` times the steps of a page. So no sequence has to leave for a while.

**Progress.** Admission keeps, for all admitted sequences i of at most W_i pages and one slot S each,

    sum(W_i) <= device pages   or   sum(W_i * page + S) + (max(W_i) - device pages) * page <= host bytes.

In the first case pages never run short. In the second case a swap that is needed always fits. Let f pages be free while
d > f are wanted, and let a victim of v pages leave. All sequences hold at most sum(W_i) - d pages. Those on the device
hold at least device pages - f - v after the swap. So the host holds less than sum(W_i) - device pages + v pages, and
v <= max(W_i). (Pages that several sequences share count for each of them, which only makes the sums larger. Pages
without a holder count as free, since they can be taken at once. Pages of a sequence that returns count on both sides
until they have arrived. A swap that does not fit waits until then.)
So the oldest sequence on the device gets every page that it needs: it fits alone, and all younger ones can leave.
Sequences that still land hold the pages of their first step already. They become the youngest, or end at their
deadline. When the oldest ends, the next one becomes the oldest. Sequences in host memory go before every new request,
so no stream of arrivals can starve them. They come back only when the batch has a place for them. So a sequence that
has begun to run is in every step unless pages are short.
`tests/decode_node/test_scheduler.py` runs this scheduler with random schedules.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from decode_node.pages import PagePool
from decode_node.policy import SwapCandidate, pick_victim, replay_rows
from decode_node.seats import Owner, Place, Plan, Seat, StepShare, give_back
from hackkv.errors import Overloaded, RequestError
from hackkv.footprint import Footprint
from hackkv.page_names import PageName

LOW_PAGES = 1 / 16
HIGH_PAGES = 1 / 4
"""Lookahead of the watermarks, as shares of a page's steps. Larger ones leave memory idle, smaller ones swap more."""


class Lookahead(NamedTuple):
    """The number of steps that each watermark looks ahead."""

    low: int
    high: int


def lookahead(page_tokens: int) -> Lookahead:
    """The lookahead for pages of `page_tokens` tokens."""
    return Lookahead(max(1, round(LOW_PAGES * page_tokens)), max(2, round(HIGH_PAGES * page_tokens)))


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The resources that a scheduler may use."""

    host_bytes: int
    """Host memory for sequences that are swapped out."""
    max_batch: int
    """Sequences in one step."""
    replay_tokens: int
    """Rows of all replays in one step. At least one page runs."""
    replay_by_row: bool = False
    """Whether a replay runs one row a step, for codecs whose decode differs from prefill."""


class DecodeScheduler(Generic[Owner]):
    """Continuous batching of at most `max_batch` sequences, oldest first, over a pool of pages and host memory."""

    def __init__(self, pool: PagePool, footprint: Footprint, limits: SchedulerLimits) -> None:
        if limits.max_batch < 1:
            raise ValueError(f"max_batch is {limits.max_batch}")
        self.pool = pool
        self._limits = limits
        self.footprint = footprint
        self.lookahead = lookahead(footprint.page_tokens)
        self._seats: set[Seat[Owner]] = set()
        self._device: list[Seat[Owner]] = []
        self._host: list[Seat[Owner]] = []
        self._moving: set[Seat[Owner]] = set()
        self._landed = 0
        self._most_pages = 0
        """The most pages that all admitted sequences may come to hold."""
        self.running = 0
        """Sequences in the current step."""
        self.host_bytes = 0
        """Host memory in use."""

    @property
    def seats(self) -> list[Seat[Owner]]:
        """All sequences that were admitted and have not left."""
        return list(self._seats)

    @property
    def waiting(self) -> int:
        """Sequences that have landed and are not in the current step."""
        return sum(not seat.busy for seat in self._device) + self.swapped

    @property
    def swapped(self) -> int:
        """Sequences that are in host memory, or on the way there or back."""
        return len(self._host) + len(self._moving)

    @property
    def is_roomy(self) -> bool:
        """Whether the pool has all pages that its sequences may come to hold, so that no sequence waits for one."""
        return self._most_pages <= self.pool.num_pages

    @property
    def reserved_tokens(self) -> int:
        """The most rows that all admitted sequences may come to hold."""
        return sum(seat.limit for seat in self._seats)

    # Coming and going -----------------------------------------------------------------------------------------------

    def admit(self, owner: Owner, rows: int, limit: int, names: Sequence[PageName] = ()) -> Seat[Owner]:
        """Take pages for `rows` rows and the step after them; the sequence may grow to `limit` rows.

        The first pages, whose names are `names`, are shared if they are known. If some have to come from host memory
        (`Grant.loads`), `loaded` must follow.

        Raises `RequestError` if the sequence could not even run alone, and `Overloaded` if there is no room now.
        """
        worst = self.footprint.sealed(limit)
        if worst > self.pool.num_pages:
            too_long = "prompt" if self.footprint.sealed(rows) > self.pool.num_pages else "max_tokens"
            raise RequestError(f"{limit} tokens need {worst} pages; this node has {self.pool.num_pages}", too_long)
        if self.swapped:
            raise Overloaded(f"{self.swapped} sequences wait in host memory and go first")
        roomy = self._most_pages + worst <= self.pool.num_pages
        everybody = () if roomy else (limit, *(seat.limit for seat in self._seats))
        if not (roomy or all_end(self.footprint, everybody, self.pool.num_pages, self._limits.host_bytes)):
            raise Overloaded(f"{limit} tokens more may not fit into this node's device and host memory")
        seat = Seat(owner, rows, limit, None)
        need = self.footprint.sealed(seat.reach(1))
        growth = 0 if roomy else self._demand(self.lookahead.high, [*self._seats, seat]) - need
        fresh = self.pool.taken_by(need, names)
        grant = self.pool.take(need, names) if fresh + growth <= self.pool.free_pages else None
        if grant is None:
            free, slots = self.pool.free_pages, self.pool.free_slots
            raise Overloaded(
                f"{fresh} pages, {growth} more to grow and a slot are needed; {free} pages and {slots} slots are free"
            )
        seat.grant, seat.loading = grant, bool(grant.loads)
        self._seats.add(seat)
        self._most_pages += worst
        return seat

    def loaded(self, seat: Seat[Owner], *, worked: bool = True) -> None:
        """Report that the pages of `Grant.loads` have arrived, or failed to (not `worked`)."""
        self.pool.kept.loaded(seat.held_grant.loads, worked=worked)
        seat.loading = False
        if seat.place is Place.GONE:
            self._release(seat)

    def land(self, seat: Seat[Owner], pending: int = 1) -> None:
        """Report that a sequence's KV is complete. It runs as soon as the batch has a place for it.

        Its first `pending` - 1 rows are a replay. A sequence that has left meanwhile is ignored.
        """
        if seat.place is Place.GONE:
            return
        self._landed += 1
        seat.order, seat.pending, seat.place = self._landed, pending, Place.DEVICE
        self._device.append(seat)

    def leave(self, seat: Seat[Owner]) -> None:
        """Take a sequence out. Pages that a step or copy uses become free when that is over. A repeat has no effect."""
        if seat.place is Place.GONE:
            return
        for group in (self._device, self._host):
            if seat in group:
                group.remove(seat)
        seat.place = Place.GONE
        self._seats.remove(seat)
        if not (seat.busy or seat.loading or seat in self._moving):
            self._release(seat)

    # Between two steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> Plan[Owner]:
        """Return the next step and copies. `stepped` and `copied` report their end. No step may be under way."""
        leaving = self._make_room()
        returning = self._bring_back()
        shares = self._shares()
        for share in shares:
            share.seat.busy = True
        self.running = len(shares)
        return Plan(shares, leaving, returning)

    def stepped(self, shares: Iterable[StepShare[Owner]], *, advanced: bool) -> None:
        """Report that the step is over. If it failed (not `advanced`), no sequence has gained rows."""
        self.running = 0
        for share in shares:
            seat = share.seat
            seat.busy = False
            if advanced:
                seat.rows += share.rows
                seat.pending -= share.rows if share.replay else 0
            if seat.place is Place.GONE:
                self._release(seat)

    def copied(self, seat: Seat[Owner]) -> None:
        """Report that a sequence's copy, out or back, is done."""
        self._moving.remove(seat)
        if seat.place is Place.GONE:
            self._release(seat)
        elif seat.place is Place.LEAVING:
            give_back(self.pool, seat)
            seat.place = Place.HOST
            insort(self._host, seat, key=_order)
        else:
            self.host_bytes, seat.host_bytes = self.host_bytes - seat.host_bytes, 0
            seat.place = Place.DEVICE
            insort(self._device, seat, key=_order)

    def _make_room(self) -> list[Seat[Owner]]:
        """Choose sequences to swap out, until the batch can go on for `lookahead.low` steps."""
        leaving: list[Seat[Owner]] = []
        if self.is_roomy:
            return leaving
        batch = self._limits.max_batch
        while (short := self._demand(self.lookahead.low, self._device[:batch]) - self.pool.free_pages) > 0:
            if short <= self.pool.freed_by(
                seat.held_grant for seat in self._moving if seat.place is not Place.RETURNING
            ):
                break
            candidates = [SwapCandidate(seat.order, seat.pages, seat.limit - seat.rows) for seat in self._device]
            chosen = pick_victim(candidates)
            if chosen is None:
                break
            victim = self._device[chosen]
            size = self.footprint.resting_bytes(victim.rows)
            if self.host_bytes + size > self._limits.host_bytes:
                break
            del self._device[chosen]
            victim.place, victim.host_bytes = Place.LEAVING, size
            self.host_bytes += size
            self._moving.add(victim)
            leaving.append(victim)
        return leaving

    def _bring_back(self) -> list[Seat[Owner]]:
        """Bring back the oldest swapped sequences, while the batch has places and all on the device can go on for
        `lookahead.high` steps. So a sequence that returns never pushes out one that runs.
        """
        returning: list[Seat[Owner]] = []
        if not self._host:
            return returning
        coming = sum(seat.place is Place.RETURNING for seat in self._moving)
        while self._host and len(self._device) + coming + len(returning) < self._limits.max_batch:
            seat = self._host[0]
            need = self.footprint.sealed(min(seat.rows + 1, seat.limit))
            here = [other for other in self._seats if other.place in (Place.LANDING, Place.DEVICE, Place.RETURNING)]
            growth = self._demand(self.lookahead.high, [*here, seat]) - need if here else 0
            grant = self.pool.take(need) if need + growth <= self.pool.free_pages else None
            if grant is None:
                break
            del self._host[0]
            seat.grant, seat.place = grant, Place.RETURNING
            self._moving.add(seat)
            returning.append(seat)
        return returning

    def _shares(self) -> list[StepShare[Owner]]:
        shares: list[StepShare[Owner]] = []
        budget = max(self._limits.replay_tokens, self.footprint.page_tokens)
        for seat in self._device:
            if len(shares) == self._limits.max_batch:
                break
            replay = seat.pending > 1
            rows = self._replay_rows(seat, budget) if replay else 1
            if rows and self._grow(seat, seat.rows + rows):
                shares.append(StepShare(seat, rows, replay))
                budget -= rows if replay else 0
        return shares

    def _replay_rows(self, seat: Seat[Owner], budget: int) -> int:
        """Rows of the next chunk, within the budget and the pages that are held or free."""
        page_tokens = self.footprint.page_tokens
        by_page = self.footprint.window.recent > 0
        rows = 1 if self._limits.replay_by_row else seat.pending - 1
        rows = replay_rows(seat.rows, rows, budget, page_tokens, by_page=by_page)
        while rows and self.footprint.sealed(seat.rows + rows) > seat.pages + self.pool.free_pages:
            rows = max(0, (seat.rows + rows - 1) // page_tokens * page_tokens - seat.rows)
        return rows

    def _grow(self, seat: Seat[Owner], rows: int) -> bool:
        """Take the pages that `seat` lacks for `rows` rows. False if they are not free."""
        missing = self.footprint.sealed(rows) - seat.pages
        if missing > 0:
            assert seat.grant is not None
            grown = self.pool.extend(seat.grant, missing)
            if grown is None:
                return False
            seat.grant = grown
        return True

    # Sums -----------------------------------------------------------------------------------------------------------

    def _demand(self, steps: int, seats: Iterable[Seat[Owner]]) -> int:
        """Pages that `seats` lack to go on for `steps` steps. A sequence without a grant lacks all that it needs."""
        sealed, pages = self.footprint.sealed, 0
        for seat in seats:  # a hot loop: a sum of maxima is slower
            lacks = sealed(seat.reach(steps)) - seat.pages
            if lacks > 0:
                pages += lacks
        return pages

    def _release(self, seat: Seat[Owner]) -> None:
        self.host_bytes, seat.host_bytes = self.host_bytes - seat.host_bytes, 0
        self._most_pages -= self.footprint.sealed(seat.limit)
        give_back(self.pool, seat)


def all_end(footprint: Footprint, most_rows: Sequence[int], num_pages: int, host_bytes: int) -> bool:
    """Whether sequences that may grow to `most_rows` rows are sure to end; see "Progress" in the module's docstring."""
    worst = [footprint.sealed(rows) for rows in most_rows]
    if sum(worst) <= num_pages:
        return True
    on_device = (num_pages - max(worst)) * footprint.page_bytes
    return sum(map(footprint.most_bytes, most_rows)) - on_device <= host_bytes


def _order(seat: Seat[Owner]) -> int:
    return seat.order
