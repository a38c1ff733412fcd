"""The line for room: which request is served, which may be passed, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.order import Ageing, Demand, Ticket, next_in_line
from router.fleet.policy import Need

AGEING = Ageing(ageing_s=5.0, max_passed=3)
NOW = 10.0

TICKETS = st.lists(
    st.builds(
        Ticket,
        st.builds(Demand, st.integers(1, 20).map(lambda pages: Need(pages, pages)), st.integers(0, 100)),
        st.sampled_from([0.0, 6.0, 9.0]),
        st.integers(0, 4),
    ),
    max_size=8,
)


def serve(line: list[Ticket], free: int) -> int | None:
    """The next request in line, on a pool that could hold any request."""
    return next_in_line(line, lambda demand: demand.need.landing <= free, lambda demand: True, NOW, AGEING)


def impatient(ticket: Ticket) -> bool:
    """Whether a request has waited so long, or was passed so often, that it may not be passed again."""
    return NOW - ticket.since >= AGEING.ageing_s or ticket.passed >= AGEING.max_passed


@given(TICKETS, st.integers(0, 20), st.integers(0, 20))
def test_the_first_that_fits_is_served_unless_someone_impatient_stands_before_it(
    line: list[Ticket], free: int, total: int
) -> None:
    total = max(free, total)
    index = next_in_line(
        line, lambda demand: demand.need.landing <= free, lambda demand: demand.need.whole <= total, NOW, AGEING
    )
    fitting = next((at for at, ticket in enumerate(line) if ticket.demand.need.landing <= free), len(line))
    blocked = any(impatient(ticket) and ticket.demand.need.whole <= total for ticket in line[:fitting])
    assert index == (None if blocked or fitting == len(line) else fitting)


@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 4)), min_size=1, max_size=40), st.integers(10, 12))
def test_everybody_is_served_and_nobody_is_passed_more_often_than_allowed(
    requests: list[tuple[int, int]], pages: int
) -> None:
    """Each request holds pages of a pool for a few ticks. The clock stands still, so only being passed counts."""
    free, tick = pages, 0
    line: list[Ticket] = []
    running: list[tuple[int, int]] = []
    coming = list(enumerate(requests))
    ticks_of = {number: ticks for number, (_, ticks) in coming}
    served: list[Ticket] = []
    while coming or line or running:
        tick += 1
        assert tick < 1000, "somebody waits for ever"
        free += sum(held for ends, held in running if ends == tick)
        running = [(ends, held) for ends, held in running if ends > tick]
        if coming:
            number, (size, _) = coming.pop(0)
            line.append(Ticket(Demand(Need(size, size), number), NOW))
        while (index := serve(line, free)) is not None:
            for passed in line[:index]:
                passed.passed += 1
            ticket = line.pop(index)
            free -= ticket.demand.need.landing
            running.append((tick + ticks_of[ticket.demand.serial], ticket.demand.need.landing))
            served.append(ticket)
    assert len(served) == len(requests)
    assert max(ticket.passed for ticket in served) <= AGEING.max_passed
    assert free == pages
