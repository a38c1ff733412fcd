"""Replicas that start and stop with the load. The live cluster has no such controller of its own.

The rules are those that a deployment would give an autoscaler (prefill by seconds of queued work, decode by pages in
use, never by how busy a processor is). Upwards, as many replicas start at once as the load asks for. Downwards, one
stops at a time, and only after the load has been low for long. A replica costs from its start on, and takes requests
once it is up. A replica that ends takes no new request, serves its own, and costs until they are over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from sim.eventlog import EventKind
from sim.placing import Shelf
from sim.router import Router
from sim.spec import Scale, Spec
from sim.world import World

TICK_S = 15.0
"""Seconds between two looks at the load."""
STEP_DOWN_S = 60.0
"""While the load stays low, one more replica stops after so many seconds."""


@dataclass(slots=True)
class Scaler:
    """Decides how many replicas run. Time is an argument."""

    scale: Scale
    most: int
    low_since: float | None = None

    def wanted(self, running: int, load: float, now: float) -> int:
        """How many replicas should run, if `running` replicas run at a mean load of `load`."""
        if load > self.scale.up_at:
            self.low_since = None
            return min(self.most, math.ceil(running * load / self.scale.up_at))
        if load >= self.scale.down_at:
            self.low_since = None
            return running
        if self.low_since is None:
            self.low_since = now
        if now - self.low_since < self.scale.down_after_s:
            return running
        self.low_since = now - self.scale.down_after_s + STEP_DOWN_S
        return max(self.scale.least, running - 1)


class ReplicaState(Enum):
    """The state of a replica."""

    OFF = auto()
    STARTING = auto()
    UP = auto()
    ENDING = auto()
    """Takes no new request and ends its own."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The controller's view of the replicas of a role."""

    load: Callable[[list[int]], float]
    """The load of the replicas at these places."""
    is_idle: Callable[[int], bool]
    on_up: Callable[[], None]
    """Called when a replica begins to take requests."""


class Staff:
    """The controller of the replicas of one role of one router. Call `tick` every `TICK_S`."""

    def __init__(self, world: World, scale: Scale, shelf: Shelf, watched: Watched) -> None:
        self._world, self._scale, self._shelf, self._watched = world, scale, shelf, watched
        size = len(shelf.names)
        self._scaler = Scaler(scale, size)
        self._states = [ReplicaState.UP if index < scale.least else ReplicaState.OFF for index in range(size)]
        for index, state in enumerate(self._states):
            shelf.mark(index, up=state is ReplicaState.UP)
        self.paid_s = 0.0
        """Seconds of all replicas while they were not off."""

    def tick(self) -> None:
        """Pay for the time since the last tick, look at the load, start and stop."""
        self.paid_s += TICK_S * (len(self._states) - self._states.count(ReplicaState.OFF))
        for index in self._at(ReplicaState.ENDING):
            if self._watched.is_idle(index):
                self._states[index] = ReplicaState.OFF
        up, running = self._at(ReplicaState.UP), len(self._at(ReplicaState.UP, ReplicaState.STARTING))
        more = self._scaler.wanted(running, self._watched.load(up), self._world.now) - running
        if more:
            self._world.log.add(self._world.now, EventKind.SCALED, -1, running + more)
        for index in self._at(ReplicaState.ENDING, ReplicaState.OFF)[: max(0, more)]:
            self._start(index)
        for index in up[len(up) + min(0, more) :]:
            self._states[index] = ReplicaState.ENDING
            self._shelf.mark(index, up=False)

    def _start(self, index: int) -> None:
        """Start a replica. A replica that still ends its requests is back at once."""
        takes_s = self._scale.start_s if self._states[index] is ReplicaState.OFF else 0.0
        self._states[index] = ReplicaState.STARTING
        self._world.after(takes_s, lambda: self._started(index))

    def _started(self, index: int) -> None:
        self._states[index] = ReplicaState.UP
        self._shelf.mark(index, up=True)
        self._watched.on_up()

    def _at(self, *states: ReplicaState) -> list[int]:
        return [index for index, state in enumerate(self._states) if state in states]


def staff_of(world: World, spec: Spec, router: Router) -> dict[str, Staff]:
    """Role -> its controller, for each role that scales. Such a role has one pool."""
    prefills, rooms, staff = router.prefills, router.rooms, {}

    def queued_s(up: list[int]) -> float:
        """Mean seconds of queued work per replica, at the speed that was measured so far."""
        tokens, busy_s = sum(one.tally.tokens for one in prefills), sum(one.tally.busy_s for one in prefills)
        return sum(prefills[index].queued_tokens for index in up) * busy_s / max(1, tokens) / max(1, len(up))

    def used(up: list[int]) -> float:
        pools = [rooms.sites[index].replica.pool for index in up]
        free = sum(pool.free_pages for pool in pools)
        return 1.0 if len(rooms) else 1 - free / max(1, sum(pool.num_pages for pool in pools))

    def is_done(index: int) -> bool:
        return not prefills[index].shipments and not prefills[index].queued_tokens

    if spec.prefill and (scale := spec.prefill[0].scale) is not None:
        staff["prefill"] = Staff(world, scale, router.shelf, Watched(queued_s, is_done, lambda: None))
    if (scale := spec.decode[0].scale) is not None:
        watched = Watched(used, lambda index: not rooms.sites[index].replica.scheduler.seats, rooms.serve)
        staff["decode"] = Staff(world, scale, rooms.shelf, watched)
    return staff
