"""Who runs, who grows, who waits in host memory: decided between any two steps. Numbers only, no tensors.

A sequence takes pages as it seals them. Before a step it owns what the step needs, or it is not in the step. When
pages run short, victims (`decode_node.policy`) leave for host memory, and come back oldest first; nothing is ever
computed twice.

**Hysteresis.** Who will need a page, and when, is known: its last page fills in so many steps. A victim leaves when the
batch will run out of pages within `LOW_PAGES` of a page's steps, early enough for its copy to run beside them. Somebody
comes in, or back, only if all who are here can then go on for `HIGH_PAGES`, and so for a while nobody has to leave.

**Progress.** Admission keeps, for all admitted sequences i of at most W_i pages and one open page S each,

    sum(W_i) <= device pages   or   sum(W_i * page + S) + (max(W_i) - device pages) * page <= host bytes.

In the first case nobody ever runs short. In the second, a swap that is needed always fits: let f pages be free while
d > f are wanted, and v leave. All hold at most sum(W_i) - d pages, and those on the device at least
device pages - f - v after that, so the host holds less than sum(W_i) - device pages + v, and v <= max(W_i).
(Pages on their way back stand on both sides until they have arrived; a swap that does not fit waits for that.)
So the oldest sequence on the device gets every page that it wants: it fits alone, all younger ones can leave, and those
that still land own their next step and become young ones, or close at their deadline. Once it ends the next one is the
oldest. Those in host memory go before every new request, so no stream of arrivals can starve them; they come back when
the batch has a place for them, so whoever has begun to run is in every step unless pages are short.
`tests/decode_node/test_scheduler.py` runs this against random schedules.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from decode_node.policy import Candidate, pick_victim, replay_rows
from hackkv.errors import Overloaded, RequestError
from hackkv.pages import Grant, PagePool

LOW_PAGES = 1 / 16
HIGH_PAGES = 1 / 4
"""How far ahead the watermarks look, in pages' worth of steps: farther leaves memory idle, nearer swaps more often."""

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a sequence weighs, over all layers and KV heads."""

    sealed: Callable[[int], int]
    """Pages that a sequence of so many tokens fills (`KvCodec.sealed_pages`); its other rows are in the open page."""
    page_tokens: int
    page_bytes: int
    row_bytes: int
    """One row of the open page, K and V."""

    def rows(self, tokens: int) -> int:
        """Rows of a sequence of so many tokens that lie in its open page."""
        return max(0, tokens - self.sealed(tokens) * self.page_tokens)

    def host_bytes(self, tokens: int) -> int:
        """What it takes in host memory."""
        return self.sealed(tokens) * self.page_bytes + self.rows(tokens) * self.row_bytes

    def worst_bytes(self, tokens: int) -> int:
        """The most that it takes in host memory on its way to `tokens`."""
        return self.sealed(tokens) * self.page_bytes + self.page_tokens * self.row_bytes


class Place(Enum):
    """Where a sequence's KV is."""

    LANDING = auto()
    """A prefill node writes it."""
    DEVICE = auto()
    LEAVING = auto()
    """On its way to host memory."""
    HOST = auto()
    RETURNING = auto()
    """On its way back."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Seat(Generic[Owner]):
    """One admitted sequence."""

    owner: Owner
    tokens: int
    """In the cache."""
    limit: int
    """The most that may come to be there."""
    grant: Grant | None
    place: Place = Place.LANDING
    ticket: int = 0
    """Order of landing."""
    pending: int = 1
    """Tokens to run until the next one can be chosen; more than one in a replay."""
    host_bytes: int = 0
    busy: bool = False
    """In the step that runs now."""

    def reach(self, steps: int) -> int:
        """Tokens in the cache after so many more steps, its replay not counted among them."""
        return min(self.limit, self.tokens + self.pending - 1 + steps)

    @property
    def pages(self) -> int:
        """Pages that it holds on the device."""
        return len(self.grant.pages) if self.grant else 0


class Turn(NamedTuple, Generic[Owner]):
    """A sequence's part in a step: `rows` rows; a token is chosen after them unless they are a replay's."""

    seat: Seat[Owner]
    rows: int
    replay: bool


@dataclass(frozen=True, slots=True)
class Plan(Generic[Owner]):
    """What to do now: one step, and copies that run beside it."""

    turns: list[Turn[Owner]] = field(default_factory=list)
    leaving: list[Seat[Owner]] = field(default_factory=list)
    returning: list[Seat[Owner]] = field(default_factory=list)


class DecodeScheduler(Generic[Owner]):
    """Continuous batching of at most `max_batch` sequences, oldest first, over a pool of pages and host memory."""

    def __init__(
        self, pool: PagePool, footprint: Footprint, *, host_bytes: int, max_batch: int, replay_tokens: int
    ) -> None:
        """`replay_tokens` bounds the rows of all replays in one step; at least one page runs."""
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}")
        self._pool = pool
        self.footprint = footprint
        self._capacity_bytes = host_bytes
        self._max_batch = max_batch
        self._low_steps = max(1, round(LOW_PAGES * footprint.page_tokens))
        self._high_steps = max(2, round(HIGH_PAGES * footprint.page_tokens))
        self._replay_tokens = max(replay_tokens, footprint.page_tokens)
        self._seats: set[Seat[Owner]] = set()
        self._device: list[Seat[Owner]] = []
        self._host: list[Seat[Owner]] = []
        self._moving: set[Seat[Owner]] = set()
        self._tickets = 0
        self.running = 0
        """Sequences in the current step."""
        self.host_bytes = 0
        """Host memory in use."""

    @property
    def seats(self) -> list[Seat[Owner]]:
        """Everybody who was admitted and has not left."""
        return list(self._seats)

    @property
    def waiting(self) -> int:
        """Sequences that have landed and are not in the current step."""
        return sum(not seat.busy for seat in self._device) + self.swapped

    @property
    def swapped(self) -> int:
        """Sequences that are in host memory or on their way."""
        return len(self._host) + len(self._moving)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that all admitted sequences may come to."""
        return sum(seat.limit for seat in self._seats)

    # Coming and going -----------------------------------------------------------------------------------------------

    def admit(self, owner: Owner, tokens: int, limit: int) -> Seat[Owner]:
        """Take pages for `tokens` tokens and the step after them; the sequence may grow to `limit`.

        Raises `RequestError` if it could not even run alone, and `Overloaded` if it cannot come in now.
        """
        worst = self.footprint.sealed(limit)
        if worst > self._pool.num_pages:
            too_long = "prompt" if self.footprint.sealed(tokens) > self._pool.num_pages else "max_tokens"
            raise RequestError(f"{limit} tokens need {worst} pages; this node has {self._pool.num_pages}", too_long)
        if self.swapped:
            raise Overloaded(f"{self.swapped} sequences wait in host memory and go first")
        if not self._can_always_swap(limit):
            raise Overloaded(f"{limit} tokens more may not fit into this node's device and host memory")
        seat = Seat(owner, tokens, limit, None)
        need = self.footprint.sealed(seat.reach(1))
        growth = self._demand(self._high_steps, [*self._seats, seat]) - need
        grant = self._pool.take(need) if need + growth <= self._pool.free_pages else None
        if grant is None:
            free, slots = self._pool.free_pages, self._pool.free_slots
            raise Overloaded(
                f"{need} pages, {growth} more to grow and a slot are needed; {free} pages and {slots} slots are free"
            )
        seat.grant = grant
        self._seats.add(seat)
        return seat

    def land(self, seat: Seat[Owner], pending: int = 1) -> None:
        """Its KV is complete: it runs as soon as there is a place in the batch, after `pending` - 1 rows of replay.

        Without effect if it has left meanwhile.
        """
        if seat.place is Place.GONE:
            return
        self._tickets += 1
        seat.ticket, seat.pending, seat.place = self._tickets, pending, Place.DEVICE
        self._device.append(seat)

    def leave(self, seat: Seat[Owner]) -> None:
        """Let it go, wherever it is. What a step or a copy still uses comes back when that is over. Once is enough."""
        if seat.place is Place.GONE:
            return
        for group in (self._device, self._host):
            if seat in group:
                group.remove(seat)
        seat.place = Place.GONE
        self._seats.remove(seat)
        if not seat.busy and seat not in self._moving:
            self._release(seat)

    # Between two steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> Plan[Owner]:
        """What to do now; `stepped` and `copied` say when it is done. Nothing may be under way but copies."""
        leaving = self._make_room()
        returning = self._bring_back()
        turns = self._turns()
        for turn in turns:
            turn.seat.busy = True
        self.running = len(turns)
        return Plan(turns, leaving, returning)

    def stepped(self, turns: Iterable[Turn[Owner]], *, advanced: bool) -> None:
        """The step is over; if it failed (not `advanced`), nobody has moved."""
        self.running = 0
        for turn in turns:
            seat = turn.seat
            seat.busy = False
            if advanced:
                seat.tokens += turn.rows
                seat.pending -= turn.rows if turn.replay else 0
            if seat.place is Place.GONE:
                self._release(seat)

    def copied(self, seat: Seat[Owner]) -> None:
        """Its copy, out or back, is done."""
        self._moving.remove(seat)
        if seat.place is Place.GONE:
            self._release(seat)
        elif seat.place is Place.LEAVING:
            self._give_back(seat)
            seat.place = Place.HOST
            insort(self._host, seat, key=_ticket)
        else:
            self._free_host(seat)
            seat.place = Place.DEVICE
            insort(self._device, seat, key=_ticket)

    def _make_room(self) -> list[Seat[Owner]]:
        """Swap out until the batch can go on for `_low_steps`."""
        leaving: list[Seat[Owner]] = []
        coming = sum(seat.pages for seat in self._moving if seat.place is not Place.RETURNING)
        while self._demand(self._low_steps, self._device[: self._max_batch]) > self._pool.free_pages + coming:
            candidates = [Candidate(seat.ticket, seat.pages, seat.limit - seat.tokens) for seat in self._device]
            chosen = pick_victim(candidates)
            if chosen is None:
                break
            victim = self._device[chosen]
            size = self.footprint.host_bytes(victim.tokens)
            if self.host_bytes + size > self._capacity_bytes:
                break
            del self._device[chosen]
            victim.place, victim.host_bytes = Place.LEAVING, size
            self.host_bytes += size
            self._moving.add(victim)
            coming += victim.pages
            leaving.append(victim)
        return leaving

    def _bring_back(self) -> list[Seat[Owner]]:
        """Bring back the oldest while those who are here can go on for `_high_steps`, and the batch has a place: who
        runs is never pushed out by somebody who returns."""
        returning: list[Seat[Owner]] = []
        coming = sum(seat.place is Place.RETURNING for seat in self._moving)
        while self._host and len(self._device) + coming + len(returning) < self._max_batch:
            seat = self._host[0]
            need = self.footprint.sealed(min(seat.tokens + 1, seat.limit))
            here = [other for other in self._seats if other.place in (Place.LANDING, Place.DEVICE, Place.RETURNING)]
            growth = self._demand(self._high_steps, [*here, seat]) - need if here else 0
            grant = self._pool.take(need) if need + growth <= self._pool.free_pages else None
            if grant is None:
                break
            del self._host[0]
            seat.grant, seat.place = grant, Place.RETURNING
            self._moving.add(seat)
            returning.append(seat)
        return returning

    def _turns(self) -> list[Turn[Owner]]:
        turns: list[Turn[Owner]] = []
        budget = self._replay_tokens
        for seat in self._device:
            if len(turns) == self._max_batch:
                break
            replay = seat.pending > 1
            rows = self._replay_rows(seat, budget) if replay else 1
            if rows and self._grow(seat, seat.tokens + rows):
                turns.append(Turn(seat, rows, replay))
                budget -= rows if replay else 0
        return turns

    def _replay_rows(self, seat: Seat[Owner], budget: int) -> int:
        """Rows of the next chunk: within the budget, and within the pages that are there."""
        page_tokens = self.footprint.page_tokens
        rows = replay_rows(seat.tokens, seat.pending - 1, budget, page_tokens)
        while rows and self.footprint.sealed(seat.tokens + rows) > seat.pages + self._pool.free_pages:
            rows = max(0, (seat.tokens + rows - 1) // page_tokens * page_tokens - seat.tokens)
        return rows

    def _grow(self, seat: Seat[Owner], tokens: int) -> bool:
        """See that it owns the pages of `tokens` tokens."""
        missing = self.footprint.sealed(tokens) - seat.pages
        if missing > 0:
            assert seat.grant is not None
            grown = self._pool.extend(seat.grant, missing)
            if grown is None:
                return False
            seat.grant = grown
        return True

    # Sums -----------------------------------------------------------------------------------------------------------

    def _demand(self, steps: int, seats: Iterable[Seat[Owner]]) -> int:
        """Pages that `seats`, as far as they are on the device, lack to go on for so many steps."""
        sealed = self.footprint.sealed
        return sum(max(0, sealed(seat.reach(steps)) - seat.pages) for seat in seats)

    def _can_always_swap(self, limit: int) -> bool:
        """Whether progress is still certain with one more sequence of `limit` tokens; see the module's docstring."""
        limits = [limit, *(seat.limit for seat in self._seats)]
        worst = [self.footprint.sealed(each) for each in limits]
        if sum(worst) <= self._pool.num_pages:
            return True
        on_device = (self._pool.num_pages - max(worst)) * self.footprint.page_bytes
        return sum(map(self.footprint.worst_bytes, limits)) - on_device <= self._capacity_bytes

    def _release(self, seat: Seat[Owner]) -> None:
        self._free_host(seat)
        if seat.grant is not None:
            self._give_back(seat)

    def _give_back(self, seat: Seat[Owner]) -> None:
        assert seat.grant is not None
        self._pool.give_back(seat.grant)
        seat.grant = None

    def _free_host(self, seat: Seat[Owner]) -> None:
        self.host_bytes -= seat.host_bytes
        seat.host_bytes = 0


def _ticket(seat: Seat[Owner]) -> int:
    return seat.ticket
