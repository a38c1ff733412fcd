"""Pages of a new sequence that are only in host memory."""

from __future__ import annotations

from hack_kernels.window import OWN_PAGE_ONLY

from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from decode_node.seats import publish
from hackkv.footprint import Footprint
from hackkv.page_names import Naming
from hackkv.types import Fingerprint

PI = 4
NAMING = Naming(PI, Fingerprint(()))
FOOTPRINT = Footprint(PI, page_bytes=10, wire_page_bytes=10, row_bytes=3, window=OWN_PAGE_ONLY)


def test_pages_that_come_back_from_host_memory_stay_taken_until_they_are_there() -> None:
    """The request ends before its pages have arrived. After that they are free and can be shared."""
    pool = PagePool(3, 2, host_places=3)
    made: DecodeScheduler[str] = DecodeScheduler(pool, FOOTPRINT, SchedulerLimits(10_000, 4, 2 * PI))
    names = NAMING.names((1,) * 2 * PI, "")
    first = made.admit("a", 2 * PI, 3 * PI, names)
    publish(pool, first, names)
    made.leave(first)
    pool.kept.saved(pool.kept.to_save(3))
    other = made.admit("b", 3 * PI - 1, 3 * PI)
    made.leave(other)
    assert pool.kept.known == (0, 2)
    again = made.admit("a", 2 * PI, 3 * PI, names)
    assert (again.held_grant.held, len(again.held_grant.loads), again.loading) == (2, 2, True)
    before = pool.free_pages
    made.leave(again)
    assert (pool.free_pages, made.seats) == (before, [])
    made.loaded(again)
    assert pool.free_pages == 3
    assert pool.kept.known == (2, 2)
