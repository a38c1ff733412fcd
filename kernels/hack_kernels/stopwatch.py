"""Time that a device spends, for backends whose calls return when the work is done."""

from __future__ import annotations

from time import perf_counter


class HostStopwatch:
    """Implements `Stopwatch` with the processor's clock."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds += perf_counter() - self._began
