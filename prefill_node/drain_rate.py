"""The rate at which waiting KV leaves a prefill node. From it follows when there may be room for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0
"""Length of the window over which the rate is measured, in seconds."""
SHORTEST_S = 1.0
LONGEST_S = 60.0
"""Bounds of the answer, in seconds. The upper one is the answer when nothing left within the window."""


class DrainRate:
    """Bytes per second over a sliding window. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._left: deque[tuple[float, int]] = deque()
        self._sum = 0

    def left(self, num_bytes: int) -> None:
        """Count bytes that have just left."""
        self._left.append((self._clock(), num_bytes))
        self._sum += num_bytes
        self._forget()

    def seconds(self, num_bytes: int) -> float:
        """Seconds until `num_bytes` have left at the measured rate, within `SHORTEST_S` .. `LONGEST_S`."""
        self._forget()
        watched = min(WINDOW_S, self._clock() - self._since)
        if not self._sum:
            return LONGEST_S
        return min(LONGEST_S, max(SHORTEST_S, num_bytes * watched / self._sum))

    def _forget(self) -> None:
        past = self._clock() - WINDOW_S
        while self._left and self._left[0][0] < past:
            self._sum -= self._left.popleft()[1]
