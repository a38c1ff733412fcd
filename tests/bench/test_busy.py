"""The table of tokens a second beside busy loops."""

from __future__ import annotations

import signal

from bench import busy


def test_speeds_stand_beside_a_fair_share() -> None:
    lines = busy.table({0: [100.0, 90.0, 110.0], 1: [70.0], 2: [40.0, 60.0]}, cores=2)
    assert lines == ["| 0 | 100 | 1.00 | 1.00 |", "| 1 | 70 | 0.70 | 0.67 |", "| 2 | 50 | 0.50 | 0.50 |"]


def test_loops_end_with_the_measurement() -> None:
    with busy.busy(2) as loops:
        assert [loop.is_alive() for loop in loops] == [True, True]
    assert [loop.exitcode for loop in loops] == [-signal.SIGKILL] * 2
