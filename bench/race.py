"""Contenders that take turns, so that a noisy machine is noisy for all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

SETTLE_S = 0.01  # torch's OpenMP threads spin for milliseconds after their work, on the cores of the next contender
COLD_BYTES = 128 * 2**20  # a turn's caches together: several times the last-level cache

Calls = Sequence[Callable[[], object]]
"""What one contender does in a turn: the same call over one KV cache after another."""


def race(contenders: dict[str, Calls], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of a call of each contender, and the median of every other one's time over that of `hack`."""
    for calls in contenders.values():
        calls[0]()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, calls in contenders.items():
            sleep(SETTLE_S)
            calls[-1]()  # after the pause this warms code, tables and threads, and leaves the first cache cold
            began = perf_counter()
            for call in calls:
                call()
            times[name].append((perf_counter() - began) * 1e3 / len(calls))
    ours = times.get("hack", [])
    ratios = {
        name: statistics.median(theirs / mine for theirs, mine in zip(rows, ours, strict=True))
        for name, rows in times.items()
        if name != "hack" and ours
    }
    return {name: statistics.median(rows) for name, rows in times.items()}, ratios


def copies(num_bytes: int) -> int:
    """How many KV caches of this size a turn walks over."""
    return -(-COLD_BYTES // num_bytes)
