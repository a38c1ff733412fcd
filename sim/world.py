"""What all parts of one simulation share: its clock, its log, and the sizes of KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from hackkv.footprint import Footprint
from sim.eventlog import EventLog


@dataclass(frozen=True, slots=True)
class World:
    """One simulation."""

    footprint: Footprint
    layers: int
    macro: bool = True
    """Many decode steps as one event; results are the same."""
    log: EventLog = field(default_factory=EventLog)
    env: simpy.Environment = field(default_factory=simpy.Environment)

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return float(self.env.now)

    def then(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` later; here and now if there is nothing to wait for."""
        if seconds > 0:
            self.after(seconds, call)
        else:
            call()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` later; at once after what is due now, if `seconds` is not positive."""
        event = self.env.timeout(max(0.0, seconds))
        assert event.callbacks is not None
        event.callbacks.append(lambda _: call())
