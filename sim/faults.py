"""A fault plan in simulated time: the rules of the live injector, for the actions that the simulator knows.

The simulator knows two actions: `kill`, with the time until the node is back, at the points of `POINTS`; and `slow` on
every frame of a sender (`times: 0`). Any other rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from faults.armed import Armed, armed
from faults.plan import Action, FaultPlan, FaultRule, Point
from hackkv.errors import ConfigError
from sim.decode import DecodeReplica
from sim.eventlog import EventKind
from sim.prefill import PrefillReplica
from sim.router import Router
from sim.world import World

POINTS: Final = {
    Point.PREFILL_JOB: EventKind.PLACED_PREFILL,
    Point.FIRST_TOKEN: EventKind.FIRST_TOKEN,
    Point.DECODE_JOB: EventKind.PLACED_DECODE,
    Point.LANDED: EventKind.LANDED,
    Point.TOKEN: EventKind.STEP,
}
"""Point of a plan -> the event at which a rule is asked. A step brings one token of each of its sequences."""


class Faults:
    """The faults of one simulation. Raises `ConfigError` naming a rule that the simulator does not know."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        for index, rule in enumerate(plan.rules):
            if not _is_known(rule):
                known = ", ".join(POINTS)
                raise ConfigError(
                    f"faults.rules.{index}: {rule.do} at {rule.at} is not simulated; known are {Action.KILL} at "
                    f"{known}, and {Action.SLOW} at {Point.FRAME} with times: 0"
                )

    @property
    def at_tokens(self) -> bool:
        """Whether a rule counts tokens. If so, every step is an event of its own."""
        return any(rule.at is Point.TOKEN for rule in self._plan.rules)

    def slowed(self, node: str, rate: float) -> float:
        """A sender's rate in bytes per second under its slow rules: a frame waits for its size, then travels."""
        for rule in self._plan.rules:
            if rule.do is Action.SLOW and fnmatchcase(node, rule.node):
                rate = 1 / (1 / rate + 1 / rule.bytes_per_s)
        return rate

    def watch(
        self,
        router: Router,
        make_prefill: Callable[[int], PrefillReplica],
        make_decode: Callable[[int], DecodeReplica],
        world: World,
    ) -> None:
        """Apply the kill rules to the replicas of a router."""
        if not any(rule.do is Action.KILL for rule in self._plan.rules):
            return
        nodes: dict[tuple[str, int], tuple[int, list[Armed]]] = {}
        for role, numbers in (
            ("prefill", [replica.number for replica in router.prefills]),
            ("decode", [site.replica.number for site in router.rooms.sites]),
        ):
            for index, number in enumerate(numbers):
                nodes[role, number] = index, armed(self._plan, f"{role}-{number}")

        def happened(kind: EventKind, number: int, times: int, job: int) -> None:
            for point, watched in POINTS.items():
                if watched is not kind:
                    continue
                role = "prefill" if point in (Point.PREFILL_JOB, Point.FIRST_TOKEN) else "decode"
                index, rules = nodes.get((role, number), (0, []))
                for one in rules:
                    hit = [one.strikes(point, str(job)) for _ in range(times)]
                    if any(hit) and one.rule.do is Action.KILL:
                        world.after(0.0, partial(kill, role, index, number, one.rule))

        def kill(role: str, index: int, number: int, rule: FaultRule) -> None:
            if role == "prefill":
                router.prefill_down(index)
                if rule.seconds:
                    world.after(rule.seconds, lambda: router.prefill_up(index, make_prefill(number)))
            else:
                router.decode_down(index)
                if rule.seconds:
                    world.after(rule.seconds, lambda: router.decode_up(index, make_decode(number)))

        world.log.listeners.append(happened)


def _is_known(rule: FaultRule) -> bool:
    if rule.do is Action.SLOW:
        return rule.times == 0 and rule.chance == 1 and not rule.nth
    return rule.do is Action.KILL and rule.at in POINTS
