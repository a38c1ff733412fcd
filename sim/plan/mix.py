"""Which kinds of replicas share a role, where no kind alone is there in sufficient number: an integer program.

A replica of a kind serves 1 / `Part.alone` of the load. Chosen are whole replicas of least cost whose shares sum to 1
in every role, with no more GPUs of an instance than can be had; HiGHS solves it (`scipy.optimize.milp`). Shares add up
only nearly: a queue before replicas of several speeds waits longer than one before equal ones. The simulator knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from sim.plan.parts import Part

RIGS: Final = 3
"""Splits of an instance that a role may have."""
_GPU_USD: Final = 1e-6
"""Of equal cost, fewer GPUs are better; prices of machines of one's own are 0."""
_GAP: Final = 1e-3
"""Share of the least cost within which an answer counts as the least."""
_SECONDS: Final = 10.0


def cheapest_mix(roles: Sequence[Sequence[Part]], available: Mapping[str, int]) -> list[tuple[Part, ...]] | None:
    """Role -> its parts, in the order of `roles`; None if what can be had does not suffice."""
    sides = [best_of_each(role) for role in roles]
    parts = [part for side in sides for part in side]
    gpus = np.array([part.rig.pool.gpus for part in parts], dtype=float)
    usd = np.array([part.rig.usd for part in parts]) + _GPU_USD * gpus
    shares = np.zeros((len(sides), len(parts)))
    first = 0
    for row, side in enumerate(sides):
        shares[row, first : first + len(side)] = [1 / part.alone for part in side]
        first += len(side)
    limits = [LinearConstraint(shares, lb=1.0)]
    for name in sorted({part.rig.pool.instance for part in parts} & set(available)):
        used = [part.rig.pool.gpus * (part.rig.pool.instance == name) for part in parts]
        of_one = next(part.rig.instance.gpus for part in parts if part.rig.pool.instance == name)
        limits.append(LinearConstraint(np.array([used], dtype=float), ub=available[name] * of_one))
    options = {"mip_rel_gap": _GAP, "time_limit": _SECONDS}
    found = milp(usd, integrality=1, bounds=Bounds(0, np.inf), constraints=limits, options=options)
    if found.x is None:
        return None
    counts = iter(round(float(count)) for count in found.x)
    return [tuple(replace(part, replicas=float(n)) for part in side if (n := next(counts))) for side in sides]


def best_of_each(role: Iterable[Part], count: int = RIGS) -> list[Part]:
    """So many splits of every instance, those of least cost."""
    kept: dict[str, list[Part]] = {}
    for part in sorted(role, key=lambda part: part.role_usd):
        kept.setdefault(part.rig.pool.instance, []).append(part)
    return [part for some in kept.values() for part in some[:count]]
