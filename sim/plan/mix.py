"""A mix of kinds of replicas for a role, if no kind alone is available in sufficient number: an integer program.

A replica of a kind serves 1 / `Part.alone` of the load. The program chooses whole replicas of least cost. In every role
their shares sum to at least 1, and no instance exceeds its available GPUs. HiGHS solves it (`scipy.optimize.milp`).
Adding shares is only nearly right: a queue before replicas of several speeds waits longer than one before equal ones.
The simulator corrects that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from sim.plan.parts import Part

RIGS: Final = 3
"""The most splits of one instance that a role is offered."""
_GPU_USD: Final = 1e-6
"""Tie-break per GPU: of mixes of equal cost, the one with fewer GPUs wins. Prices of one's own machines are 0."""
_GAP: Final = 1e-3
"""Relative gap to the least cost at which the solver may stop."""
_SECONDS: Final = 10.0


def cheapest_mix(roles: Sequence[Sequence[Part]], available: Mapping[str, int]) -> list[tuple[Part, ...]] | None:
    """The parts of each role, in the order of `roles`; None if the available machines do not suffice."""
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
    """The `count` splits of every instance that cost least."""
    kept: dict[str, list[Part]] = {}
    for part in sorted(role, key=lambda part: part.role_usd):
        kept.setdefault(part.rig.pool.instance, []).append(part)
    return [part for some in kept.values() for part in some[:count]]
