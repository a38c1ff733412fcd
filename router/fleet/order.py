"""The order in which requests in line get room on a node. Decisions only: time is an argument, and nobody waits here.

The oldest request comes first, small ones may pass it, and none is passed for ever. A request that finds no room may
be passed by later requests that fit. So one large prompt does not leave pages idle that twenty small ones could use.
Once a request has waited `ageing_s` or was passed `max_passed` times, no other passes it any more, and freed pages
collect for it. A request that is too large for every node that is here now holds nobody up; the node that could hold it
may be restarting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from router.fleet.holdings import Marks
from router.fleet.policy import Need


@dataclass(frozen=True, slots=True)
class Demand:
    """The share of a node for which a request asks a desk."""

    need: Need
    serial: int
    """Place in the order of arrival at the router."""
    avoid: AbstractSet[str] = frozenset()
    """Nodes that failed the request."""
    marks: Marks = ()
    """Marks of the prompt's first pages, which nodes may hold."""
    recovering: bool = False
    """Whether the request was placed on nodes before. A full line does not turn it away then."""

    def is_no_less_than(self, other: Demand) -> bool:
        """Whether every node without room for `other` has no room for this demand either."""
        more = self.need.landing >= other.need.landing and self.need.whole >= other.need.whole
        return more and self.avoid == other.avoid


@dataclass(frozen=True, slots=True)
class Ageing:
    """Limits within which others may pass a request that does not fit."""

    ageing_s: float
    max_passed: int

    def over(self, ticket: Ticket, now: float) -> bool:
        """Whether no request may pass `ticket` any more."""
        return now - ticket.since >= self.ageing_s or ticket.passed >= self.max_passed


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in line, when it joined, and how many have passed it."""

    demand: Demand
    since: float
    passed: int = 0


def next_in_line(
    line: Sequence[Ticket],
    fits: Callable[[Demand], bool],
    could_fit: Callable[[Demand], bool],
    now: float,
    ageing: Ageing,
) -> int | None:
    """Index of the ticket to serve now, or None.

    `fits` tells whether there is room now, `could_fit` whether there is room once other requests end. A demand that
    needs no less than one refused just before is not tried, so a long line costs little.
    """
    refused: Demand | None = None
    for index, ticket in enumerate(line):
        if refused is None or not ticket.demand.is_no_less_than(refused):
            if fits(ticket.demand):
                return index
            refused = ticket.demand
        if ageing.over(ticket, now) and could_fit(ticket.demand):
            return None
    return None
