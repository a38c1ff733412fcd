"""Racks: which replicas share an uplink, and which links lie between two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sim.capacity import machines_of, uplink_of
from sim.network import SharedLink
from sim.spec import ReplicaPool, Spec

Place = tuple[str, int]
"""Role and number of a replica."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Uplink:
    """The uplink of one rack, both ways."""

    up: SharedLink
    down: SharedLink


def between(sender: Uplink | None, receiver: Uplink | None) -> tuple[SharedLink, ...]:
    """The links between the lines of two replicas: none within a rack."""
    if sender is None or receiver is None or sender is receiver:
        return ()
    return sender.up, receiver.down


def uplinks_of(
    spec: Spec, replicas: Mapping[str, Sequence[tuple[int, ReplicaPool]]], link: Callable[[str, float], SharedLink]
) -> dict[Place, Uplink]:
    """The uplink of every replica of one router; empty without racks. `replicas` are (number, pool) by role, and `link`
    makes a link of a name and a rate. A rack of several kinds gets the mean rate, weighted by machines."""
    rack = spec.network.rack
    if rack is None:
        return {}
    racks: list[list[tuple[Place, ReplicaPool]]] = []
    taken = 0.0
    for place, pool in _in_order(replicas, mixed=rack.mixed):
        index = int(taken / rack.instances + _ROUNDING)
        racks += [[] for _ in range(index + 1 - len(racks))]
        racks[index].append((place, pool))
        taken += machines_of(spec, pool)
    found: dict[Place, Uplink] = {}
    for members in filter(None, racks):
        machines = sum(machines_of(spec, pool) for _, pool in members)
        rate = sum(uplink_of(spec, pool) * machines_of(spec, pool) for _, pool in members) / machines
        role, number = members[0][0]
        name = f"rack-of-{role}-{number:06d}"
        uplink = Uplink(link(f"{name}-up", rate), link(f"{name}-down", rate))
        found.update((place, uplink) for place, _ in members)
    return found


def _in_order(
    replicas: Mapping[str, Sequence[tuple[int, ReplicaPool]]], *, mixed: bool
) -> list[tuple[Place, ReplicaPool]]:
    """All replicas: one role after the other, or, if mixed, each role spread evenly over the whole."""
    order = [
        ((index + 0.5) / len(some) if mixed else 0.0, (role, number), pool)
        for role, some in replicas.items()
        for index, (number, pool) in enumerate(some)
    ]
    return [(place, pool) for _, place, pool in sorted(order, key=lambda one: one[0])]
