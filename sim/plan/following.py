"""A planned cluster whose replicas follow a load below the planned one: what it costs then.

A plan is for the largest load, which all replicas serve; so trials leave `scale` out. Here the best plan serves a load
that rises to the planned rate, with the controllers of `sim.scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sim.cluster import Options
from sim.plan.parts import Part
from sim.plan.screen import ServiceTarget
from sim.plan.search import Trial, spec_of
from sim.shards import simulate
from sim.spec import ReplicaPool, Spec
from sim.summary import summarize
from sim.workload import synthetic

LOW: Final = 0.1
"""The share of the planned rate at which the load begins."""
_SECONDS: Final = 3600.0
_REQUESTS: Final = 20_000
"""The most requests for each router; more make the load rise in less than an hour."""


@dataclass(frozen=True, slots=True)
class FollowedLoad:
    """A plan's cluster under a load that rises from `LOW` to all of the planned rate."""

    seconds: float
    usd_per_hour: float
    """Mean price of what ran."""
    found: dict[str, float]
    """Limit -> the value in the simulation, in seconds."""
    running: tuple[tuple[str, Part, float], ...]
    """(role, part, its mean number of running replicas), in each role in the order in which kinds start."""


def follow(spec: Spec, trial: Trial, demand: ServiceTarget, seed: int) -> FollowedLoad | None:
    """Simulate the plan's cluster with the `scale` of the specification's pools; None if they have none."""
    candidate = trial.candidate
    if not any(part.rig.pool.scale for part in candidate.parts):
        return None
    whole = spec_of(spec, candidate, trial.rate, 1)
    mean_rate = trial.rate * (1 + LOW) / 2
    requests = max(1, round(min(mean_rate * _SECONDS, _REQUESTS * whole.policy.shards)))
    load = whole.load.model_copy(
        update={"rate": LOW * trial.rate, "ramp_to": trial.rate, "requests": requests, "concurrency": 0}
    )
    prefill, decode = _scaled(candidate.prefill), _scaled(candidate.decode)
    whole = whole.model_copy(update={"prefill": prefill, "decode": decode, "load": load})
    record = simulate(whole, synthetic(load, seed), Options(seed=seed))
    result = summarize(record)
    running = []
    for role, parts in (("prefill", candidate.prefill), ("decode" if candidate.prefill else "both", candidate.decode)):
        key = "prefill" if role == "prefill" else "decode"
        for part in sorted(parts, key=lambda part: part.role_usd):
            index = parts.index(part)
            ran_s = record.paid_s.get(whole.key_of(key, index), part.count * result["duration"])
            running.append((role, part, min(part.count, ran_s / result["duration"])))
    found = {str(limit): limit.found(record.rows) for limit in demand.limits}
    return FollowedLoad(result["duration"], result["usd_per_hour"], found, tuple(running))


def _scaled(parts: Sequence[Part]) -> tuple[ReplicaPool, ...]:
    """The pools of a role. Of several kinds, the one that starts first has the replicas that always run."""
    pools = []
    for part in parts:
        pool = part.rig.pool.model_copy(update={"replicas": part.count})
        if pool.scale is not None and part is not min(parts, key=lambda part: part.role_usd):
            pool = pool.model_copy(update={"scale": pool.scale.model_copy(update={"least": 0})})
        pools.append(pool)
    return tuple(pools)
