"""One machine on whose cores every process of a cluster computes.

The work of a process is a flow (`sim.network`) whose bytes are microseconds of a core. All flows cross one link, which
is as wide as the number of cores. No flow gets more than one core, since no process has more than one thread that
computes. While a core is free, work takes as long as it takes alone. Otherwise the flows share the cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sim.network import Flow, Network, SharedLink
from sim.network_spec import LinkSharing
from sim.spec import Host
from sim.world import World

_UNITS: Final = 1e6
"""Units of work in a second of a core. A flow counts as empty with a thousandth of a unit left."""


class HostCores:
    """See `sim.world.Cores`."""

    def __init__(self, world: World, of: Host) -> None:
        self.cores = SharedLink("cores", of.cores * _UNITS)
        self._network, self._of = Network(world, LinkSharing.FAIR), of
        self._router = Thread(self.compute)

    def compute(self, seconds: float, call: Callable[[], None]) -> None:
        """See `Cores`."""
        self._network.start(Flow((self.cores,), _UNITS, call), seconds * _UNITS)

    @property
    def worked_s(self) -> float:
        """Core seconds of work that is done."""
        return self.cores.carried / _UNITS

    def serve(self, seconds: float, call: Callable[[], None]) -> None:
        """See `Cores`."""
        self._router.compute(seconds, call)

    def deliver(self, tokens: int) -> None:
        """See `Cores`."""
        seconds = self._of.step_s + tokens * self._of.token_s
        if tokens and seconds:
            self._router.compute(seconds, lambda: None)


class Thread:
    """A queue of work that runs one item at a time."""

    def __init__(self, compute: Callable[[float, Callable[[], None]], None]) -> None:
        self._compute = compute
        self._todo: deque[tuple[float, Callable[[], None]]] = deque()

    def compute(self, seconds: float, call: Callable[[], None]) -> None:
        """Do this work after all work that is queued."""
        self._todo.append((seconds, call))
        if len(self._todo) == 1:
            self._begin()

    def _begin(self) -> None:
        self._compute(self._todo[0][0], self._end)

    def _end(self) -> None:
        _, call = self._todo.popleft()
        if self._todo:
            self._begin()
        call()
