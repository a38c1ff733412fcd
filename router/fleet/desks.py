"""Desks, one for each role: requests book shares of nodes there.

Load is the router's own count. It is exact at every moment, because all work of a node was booked here. Only the count
of free pages also uses the node's last report, and the node may still refuse (`Overloaded`). A request that finds no
node, or no room on one, waits in line (`router.fleet.line`). It is refused at once only if no node has filled the role
since the router started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from hackkv.errors import Overloaded
from router.fleet.booking import Booking
from router.fleet.holdings import Marks
from router.fleet.line import Line
from router.fleet.members import Member
from router.fleet.order import Ageing, Demand
from router.fleet.policy import pages_for, pick_decode, pick_prefill
from router.fleet.roster import Roster
from transport.base import DecodeNode, PrefillNode

_SMOOTHING = 0.2
"""Weight of the newest interval between two releases in their moving mean."""


@dataclass(slots=True)
class PrefixAccount:
    """Counts of prompt tokens, and of those that a desk expected the chosen nodes to hold."""

    tokens: int = 0
    """The tokens of all prompts."""
    held_tokens: int = 0
    told: Callable[[int, int], None] = lambda tokens, held: None
    """Called with both numbers of each choice."""

    def take(self, demand: Demand, member: Member[Any]) -> int:
        """Count a choice; returns how many tokens of the prompt the node is expected to hold."""
        tokens = demand.need.landing
        held = min(member.held_tokens(demand.marks), tokens - 1)
        self.tokens += tokens
        self.held_tokens += held
        self.told(tokens, held)
        return held


class PrefillDesk:
    """Books places in the prefill nodes' queues. Queues have no limit here: requests wait only for a missing node."""

    def __init__(self, nodes: Roster[PrefillNode], ageing: Ageing, now: Callable[[], float]) -> None:
        self._nodes, self._now = nodes, now
        self._line = Line(self, ageing, now)
        self._choices = count(1)
        self.account = PrefixAccount()

    def __len__(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def book(self, demand: Demand) -> Booking[PrefillNode]:
        """Put the prompt on the shortest queue. Waits while every prefill node is away.

        Raises `Unavailable` when there never was one.
        """
        self._nodes.require()
        return await self._line.wait(demand)

    def serve(self) -> None:
        """Serve the line: there may be a node for waiting requests."""
        self._line.serve()

    def fits(self, demand: Demand) -> bool:
        """Whether a node takes requests."""
        return self._choose(demand) is not None

    def could_fit(self, demand: Demand) -> bool:
        """Always false: no request waits for something that others hold."""
        return False

    def take(self, demand: Demand) -> Booking[PrefillNode] | None:
        """Book a node, if one takes requests. Tokens of the prompt that the node holds are no work."""
        member = self._choose(demand, demand.marks)
        if member is None:
            return None
        member.chosen_at = next(self._choices)
        held = self.account.take(demand, member)
        booking = Booking(member, demand.need.whole - held, 0, self._now)
        booking.will_hold(demand.marks)
        return booking

    def _choose(self, demand: Demand, marks: Marks = ()) -> Member[PrefillNode] | None:
        loads = (member.prefill_load(marks) for member in self._nodes.members)
        node_id = pick_prefill(loads, self._now(), demand.avoid)
        return None if node_id is None else self._nodes.member(node_id)


class DecodeDesk:
    """Books room for KV on decode nodes."""

    def __init__(self, nodes: Roster[DecodeNode], max_waiting: int, ageing: Ageing, now: Callable[[], float]) -> None:
        self._nodes, self._max_waiting, self._now = nodes, max_waiting, now
        self._line = Line(self, ageing, now)
        self._choices = count(1)
        self.account = PrefixAccount()
        self._released_at: float | None = None
        self._release_interval_s = 1.0

    def __len__(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def retry_after_s(self) -> float:
        """Estimated wait in seconds (1 to 60): the mean time between two releases, for every request in line."""
        return min(60.0, max(1.0, self._release_interval_s * (len(self._line) + 1)))

    def try_book(self, demand: Demand) -> Booking[DecodeNode] | None:
        """Book room for KV. Returns None if there is none, or if free room is kept for requests ahead in line.

        Raises `Overloaded` if the line is full too, and `Unavailable` if there never was a decode node.
        """
        self._nodes.require()
        booking = self._line.try_now(demand)
        if booking is None and not demand.recovering and len(self._line) >= self._max_waiting:
            raise Overloaded("too many requests wait for decode capacity", self.retry_after_s)
        return booking

    async def book(self, demand: Demand) -> Booking[DecodeNode]:
        """Book room as `try_book` does; if there is none, wait in line."""
        return self.try_book(demand) or await self._line.wait(demand)

    def serve(self) -> None:
        """Serve the line: there may be room for waiting requests."""
        self._line.serve()

    def fits(self, demand: Demand) -> bool:
        """Whether a node has room now."""
        return self._choose(demand) is not None

    def could_fit(self, demand: Demand) -> bool:
        """Whether a node that is here has room once other requests end."""
        return any(member.decode_load().could_hold(demand.need) for member in self._nodes.members)

    def take(self, demand: Demand) -> Booking[DecodeNode] | None:
        """Book room, if a node has some."""
        member = self._choose(demand, demand.marks)
        if member is None:
            return None
        member.chosen_at = next(self._choices)
        self.account.take(demand, member)
        pages = pages_for(demand.need.landing, member.info.page_tokens)
        return Booking(member, demand.need.whole, pages, self._now, self._released)

    def _choose(self, demand: Demand, marks: Marks = ()) -> Member[DecodeNode] | None:
        loads = (member.decode_load(marks) for member in self._nodes.members)
        node_id = pick_decode(loads, demand.need, self._now(), demand.avoid)
        return None if node_id is None else self._nodes.member(node_id)

    def _released(self) -> None:
        now = self._now()
        if self._released_at is not None:
            self._release_interval_s += _SMOOTHING * (now - self._released_at - self._release_interval_s)
        self._released_at = now
        self._line.serve()
