"""Contenders that take turns, so that noise of the machine hits all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

SETTLE_S = 0.01  # after their work, torch's OpenMP threads spin for milliseconds on the next contender's cores
COLD_BYTES = 128 * 2**20  # size of a turn's caches together: several times the last-level cache

Calls = Sequence[Callable[[], object]]
"""The calls of one contender in a turn: the same call over one KV cache after another."""


def race(contenders: dict[str, Calls], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds per call of each contender, and medians of the others' times over that of `hack`."""
    for calls in contenders.values():
        calls[0]()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, calls in contenders.items():
            sleep(SETTLE_S)
            calls[-1]()  # warms code, tables and threads after the pause, and leaves the first cache cold
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
    """The number of KV caches of this size over which a turn walks."""
    return -(-COLD_BYTES // num_bytes)
