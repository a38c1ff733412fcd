"""Ways to divide the cores, and the row of one."""

from __future__ import annotations

import os

import pytest

from bench.shares import Times, divisions, line


@pytest.mark.parametrize(("cores", "expected"), [(2, [(1, 1), (2, 1), (2, 2)]), (16, [(4, 4), (16, 4), (16, 16)])])
def test_nodes_have_their_share_or_all_cores(
    cores: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert divisions() == expected


def test_a_row_has_the_medians_of_the_rounds() -> None:
    rounds = [Times(3.0, 0.010, 20.0, 0.030), Times(1.0, 0.030, 10.0, 0.010), Times(2.0, 0.020, 90.0, 0.020)]
    assert line((2, 1), rounds) == "| 2 | 1 | 2.00 | 20.0 | 20.0 | 20.0 |"
