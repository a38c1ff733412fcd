"""What all parts of one simulation share: its clock, its log, and the sizes of KV.

The queue of events is a heap of its own: what is simulated are calls at moments, not processes that wait, so nothing of
simpy is needed but its queue.
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
    """What the processes of a simulation share, if they share something (`sim.host`)."""

    def compute(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` when work is done that takes `seconds` alone."""
        ...

    def serve(self, seconds: float, call: Callable[[], None]) -> None:
        """The same for work of the router, which does one thing after another."""
        ...

    def deliver(self, tokens: int) -> None:
        """Bring tokens of answers to their clients; nobody waits for it."""
        ...


@dataclass(slots=True, eq=False)
class World:
    """One simulation."""

    footprint: Footprint
    layers: int
    macro: bool = True
    """Many decode steps as one event; results are the same."""
    log: EventLog = field(default_factory=EventLog)
    cores: Cores | None = None
    """None: whatever computes has cores of its own."""
    compute: Callable[[float, Callable[[], None]], None] = field(init=False)
    """Calls something when work is done that takes so many seconds alone."""
    wire_bytes: Callable[[int], int] = field(init=False)
    """`Footprint.wire_bytes` of so many rows."""
    now: float = 0.0
    """Seconds since the simulation began."""
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.wire_bytes = cache(self.footprint.wire_bytes)
        self.compute = self.after

    def share(self, cores: Cores) -> None:
        """From now on whatever computes shares `cores`."""
        self.cores, self.compute = cores, cores.compute

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` later; at once after what is due now, if `seconds` is not positive."""
        self._count = count = self._count + 1
        heappush(self._due, (self.now + seconds if seconds > 0 else self.now, count, call))

    @property
    def is_over(self) -> bool:
        """Whether nothing is due any more."""
        return not self._due

    def run(self) -> None:
        """Let happen what is due, in the order of time and then of asking, until nothing is left."""
        due = self._due
        while due:
            self.now, _, call = heappop(due)
            call()
