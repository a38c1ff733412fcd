"""Replicas that start and stop with the load. The live cluster has no such controller of its own.

The rules are those that a deployment would give an autoscaler (prefill by seconds of queued work, decode by pages in
use, never by how busy a processor is). Upwards, as many replicas start at once as the load asks for. Downwards, one
stops at a time, and only after the load has been low for long. A replica costs from its start on, and takes requests
once it is up. A replica that ends takes no new request, serves its own, and costs until they are over.

A role has one controller, since its replicas share one load: the router gives a request to any kind. If the role has
several kinds, the kind of least cost per goodput (`sim.worth`) starts first and stops last. A fast kind counts for more
than a slow one when the load asks for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sim.eventlog import EventKind
from sim.placing import Shelf
from sim.router import Router
from sim.spec import Scale
from sim.world import World

TICK_S = 15.0
"""Seconds between two looks at the load."""
STEP_DOWN_S = 60.0
"""While the load stays low, one more replica stops after so many seconds."""
_EQUAL = 1e-9
"""Goodputs that differ by no more than this share are equal."""


@dataclass(slots=True)
class Scaler:
    """Decides how many replicas start or stop. Time is an argument."""

    scale: Scale
    low_since: float | None = None

    def change(self, running: float, spare: Sequence[float], load: float, now: float) -> int:
        """How many of `spare` should start, from the first on; -1 if one replica should stop.

        `running` is the goodput of the replicas that run, at a mean load of `load`. `spare` are the goodputs of those
        that could start.
        """
        if load > self.scale.up_at:
            self.low_since = None
            missing, count = running * (load / self.scale.up_at - 1), 0
            while count < len(spare) and missing > _EQUAL * running:
                missing -= spare[count]
                count += 1
            return count
        if load >= self.scale.down_at:
            self.low_since = None
            return 0
        if self.low_since is None:
            self.low_since = now
        if now - self.low_since < self.scale.down_after_s:
            return 0
        self.low_since = now - self.scale.down_after_s + STEP_DOWN_S
        return -1


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


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of replicas of a role."""

    key: str
    """Its pool's key in the specification."""
    scale: Scale | None
    """None: its replicas run all the time."""
    goodput: float
    """Requests per second of one replica."""
    usd_per_goodput: float


class Staff:
    """The controller of the replicas of one role of one router. Call `tick` every `TICK_S`."""

    def __init__(
        self, world: World, kinds: Sequence[Kind], kind_of: Sequence[int], shelf: Shelf, watched: Watched
    ) -> None:
        """`kind_of` has the index of each replica's kind. One kind at least has a `scale`."""
        self._world, self._kinds, self._kind_of, self._shelf, self._watched = world, kinds, kind_of, shelf, watched
        self._scaler = Scaler(next(kind.scale for kind in kinds if kind.scale is not None))
        cheapest_first = sorted(range(len(kinds)), key=lambda kind: kinds[kind].usd_per_goodput)
        self._order = sorted(range(len(kind_of)), key=lambda index: (cheapest_first.index(kind_of[index]), index))
        """Places of replicas in the order in which they start."""
        self._fixed = self._always_up()
        self._states = [ReplicaState.UP if at in self._fixed else ReplicaState.OFF for at in range(len(kind_of))]
        for index, state in enumerate(self._states):
            shelf.mark(index, up=state is ReplicaState.UP)
        self.paid_s = {kind.key: 0.0 for kind in kinds if kind.scale is not None}
        """Kind -> seconds of all its replicas while they were not off; only for kinds that scale."""

    def _always_up(self) -> frozenset[int]:
        """The replicas that never stop: the first `least` of each kind. The first of all is among them, so that the
        role is never without a replica."""
        fixed = set(self._order[:1])
        for number, kind in enumerate(self._kinds):
            own = [index for index, of in enumerate(self._kind_of) if of == number]
            fixed.update(own if kind.scale is None else own[: kind.scale.least])
        return frozenset(fixed)

    def tick(self) -> None:
        """Pay for the time since the last tick, look at the load, start and stop."""
        for index, state in enumerate(self._states):
            key = self._kinds[self._kind_of[index]].key
            if state is not ReplicaState.OFF and key in self.paid_s:
                self.paid_s[key] += TICK_S
        for index in self._at(ReplicaState.ENDING):
            if self._watched.is_idle(index):
                self._states[index] = ReplicaState.OFF
        up, running = self._at(ReplicaState.UP), self._at(ReplicaState.UP, ReplicaState.STARTING)
        spare, free = self._at(ReplicaState.ENDING, ReplicaState.OFF), [at for at in up if at not in self._fixed]
        goodput = sum(map(self._goodput, running))
        more = self._scaler.change(goodput, [*map(self._goodput, spare)], self._watched.load(up), self._world.now)
        if more < 0 and not free:
            return
        if more:
            self._world.log.add(self._world.now, EventKind.SCALED, -1, len(running) + more)
        for index in spare[: max(0, more)]:
            self._start(index)
        for index in free[-1:] if more < 0 else ():
            self._states[index] = ReplicaState.ENDING
            self._shelf.mark(index, up=False)

    def _start(self, index: int) -> None:
        """Start a replica. A replica that still ends its requests is back at once."""
        scale = self._kinds[self._kind_of[index]].scale
        assert scale is not None  # replicas of kinds without it are always up
        takes_s = scale.start_s if self._states[index] is ReplicaState.OFF else 0.0
        self._states[index] = ReplicaState.STARTING
        self._world.after(takes_s, lambda: self._started(index))

    def _started(self, index: int) -> None:
        self._states[index] = ReplicaState.UP
        self._shelf.mark(index, up=True)
        self._watched.on_up()

    def _goodput(self, index: int) -> float:
        return self._kinds[self._kind_of[index]].goodput

    def _at(self, *states: ReplicaState) -> list[int]:
        """The replicas in these states, in the order in which they start."""
        return [index for index in self._order if self._states[index] in states]


def staff_of(world: World, router: Router, kinds: dict[str, list[Kind]]) -> dict[str, Staff]:
    """Role -> its controller. `kinds` has the kinds of each role that scales."""
    prefills, rooms, staff = router.prefills, router.rooms, {}

    def queued_s(up: list[int]) -> float:
        """Mean seconds of queued work per replica, at the mean speed that was measured so far."""
        tokens, busy_s = sum(one.tally.tokens for one in prefills), sum(one.tally.busy_s for one in prefills)
        return sum(prefills[index].queued_tokens for index in up) * busy_s / max(1, tokens) / max(1, len(up))

    def used(up: list[int]) -> float:
        pools = [rooms.sites[index].replica.pool for index in up]
        free = sum(pool.free_pages for pool in pools)
        return 1.0 if len(rooms) else 1 - free / max(1, sum(pool.num_pages for pool in pools))

    def is_done(index: int) -> bool:
        return not prefills[index].shipments and not prefills[index].queued_tokens

    if "prefill" in kinds:
        watched = Watched(queued_s, is_done, lambda: None)
        kind_of = [replica.tally.kind for replica in prefills]
        staff["prefill"] = Staff(world, kinds["prefill"], kind_of, router.shelf, watched)
    if "decode" in kinds:
        watched = Watched(used, lambda index: not rooms.sites[index].replica.scheduler.seats, rooms.serve)
        kind_of = [site.replica.tally.kind for site in rooms.sites]
        staff["decode"] = Staff(world, kinds["decode"], kind_of, rooms.shelf, watched)
    return staff
