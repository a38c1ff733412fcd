"""The state that all parts of one simulation share: its clock, its log, and the sizes of KV.

The queue of events is a plain heap. Events are calls at moments, not processes that wait, so simpy has nothing to add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Protocol

from hackkv.footprint import Footprint
from sim.eventlog import EventLog


class Cores(Protocol):
    """Cores that the processes of a simulation share, if they share any (`sim.host`)."""

    def compute(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` when work is done that takes `seconds` on a core of its own."""
        ...

    def serve(self, seconds: float, call: Callable[[], None]) -> None:
        """As `compute`, for work of the router, which does one thing after another."""
        ...

    def deliver(self, tokens: int) -> None:
        """Spend the router's time on bringing tokens to their clients; nothing waits for it."""
        ...


@dataclass(slots=True, eq=False)
class World:
    """One simulation."""

    footprint: Footprint
    layers: int
    macro: bool = True
    """Run many decode steps as one event; results are the same."""
    log: EventLog = field(default_factory=EventLog)
    cores: Cores | None = None
    """None: every process has a core of its own."""
    compute: Callable[[float, Callable[[], None]], None] = field(init=False)
    """(seconds, call): calls `call` when work is done that takes `seconds` on a core of its own."""
    wire_bytes: Callable[[int], int] = field(init=False)
    """`Footprint.wire_bytes` of a number of rows, cached."""
    now: float = 0.0
    """Seconds since the simulation began."""
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.wire_bytes = cache(self.footprint.wire_bytes)
        self.compute = self.after

    def share(self, cores: Cores) -> None:
        """Let all computing share `cores` from now on."""
        self.cores, self.compute = cores, cores.compute

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` in `seconds`. If that is not positive, call it now, after all calls that are due now."""
        self._count = count = self._count + 1
        heappush(self._due, (self.now + seconds if seconds > 0 else self.now, count, call))

    @property
    def is_over(self) -> bool:
        """Whether nothing is due any more."""
        return not self._due

    def run(self) -> None:
        """Make all calls that are due, in the order of time and then of asking, until none is left."""
        due = self._due
        while due:
            self.now, _, call = heappop(due)
            call()
