"""When memory that was freed goes back to the system."""

from __future__ import annotations

import pytest

from hackkv.heap import IDLE_S, IdleTrim

BUSY, REST = 2 * IDLE_S, IDLE_S / 2


@pytest.mark.parametrize(
    ("used", "trims"),
    [
        ((REST,), 1),  # what it has loaded
        ((REST, REST, REST), 1),
        ((BUSY,), 0),
        ((BUSY, BUSY, REST, REST), 1),
        ((REST, BUSY, REST), 2),
        ((REST, BUSY, BUSY, REST, REST, BUSY, REST), 3),
    ],
)
async def test_a_process_trims_once_when_it_has_become_idle(used: tuple[float, ...], trims: int) -> None:
    """`used` are seconds of processor time between looks. Trimming takes time too, and is no work."""
    clock, count = 0.0, 0

    def trim() -> None:
        nonlocal clock, count
        clock, count = clock + BUSY, count + 1

    idle = IdleTrim(trim, lambda: clock)
    for seconds in used:
        clock += seconds
        await idle.look()
    assert count == trims
