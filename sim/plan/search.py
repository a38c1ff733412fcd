"""From candidates to a plan: the simulator counts replicas, and successive halving spends its time on the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from hackkv.errors import ConfigError
from sim.cluster import Options
from sim.plan.objective import Limit
from sim.plan.screen import ClusterCandidate, ServiceTarget, candidates
from sim.shards import simulate
from sim.spec import Spec
from sim.summary import summarize
from sim.workload import synthetic

ROUNDS: Final = ((12, 400), (6, 1_200), (3, 4_000))
"""How many candidates stay, and how many requests each is tried with."""
_PER_REPLICA: Final = 12
"""Requests for each replica, at least: a fleet has to fill before it can be judged."""
_TRIES: Final = 12
_BISECTIONS: Final = 6
_HIGHEST_RATE: Final = 1e7
_STEP: Final = 0.08
"""Share of replicas that a try adds or takes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate in the simulator."""

    candidate: ClusterCandidate
    rate: float
    """Requests per second."""
    found: dict[str, float]
    """Limit -> what the simulation had, in seconds."""
    keeps: bool
    result: dict[str, Any]
    """As `hackkv simulate` writes it."""

    @property
    def usd(self) -> float:
        """Per hour."""
        return self.candidate.usd

    @property
    def usd_per_request(self) -> float:
        """At that rate."""
        return self.usd / 3600 / self.rate


def spec_of(spec: Spec, candidate: ClusterCandidate, rate: float, requests: int) -> Spec:
    """The candidate as a specification to simulate."""
    counted = [part.rig.pool.model_copy(update={"replicas": part.count}) for part in candidate.parts]
    load = spec.load.model_copy(update={"rate": rate, "requests": requests, "concurrency": 0, "ramp_to": 0.0})
    shards = max(1, min(pool.replicas for pool in counted) // 32)
    return spec.model_copy(
        update={
            "prefill": counted[0] if candidate.prefill is not None else None,
            "decode": counted[-1],
            "codec": candidate.codec,
            "load": load,
            "policy": spec.policy.model_copy(update={"shards": shards}),
        }
    )


def try_out(spec: Spec, candidate: ClusterCandidate, demand: ServiceTarget, requests: int, seed: int) -> Trial:
    """Simulate a candidate; all see the same requests."""
    replicas = sum(part.count for part in candidate.parts)
    whole = spec_of(spec, candidate, demand.rate, max(requests, _PER_REPLICA * replicas))
    record = simulate(whole, synthetic(whole.load, seed), Options(seed=seed))
    found = {str(limit): limit.found(record.rows) for limit in demand.limits}
    result = summarize(record, candidate.kind)
    keeps = all(found[str(limit)] <= limit.seconds for limit in demand.limits) and not result["unstable"]
    return Trial(candidate, demand.rate, found, keeps, result)


def settle(spec: Spec, candidate: ClusterCandidate, demand: ServiceTarget, requests: int, seed: int) -> Trial | None:
    """The fewest replicas of a candidate's rigs that keep the objective, by steps from what formulas say; None if that
    takes more than can be had."""
    trial = try_out(spec, candidate, demand, requests, seed)
    if trial.keeps:
        return _fewer(spec, trial, demand, requests, seed)
    for _ in range(_TRIES):
        more = _more(trial, demand.limits)
        if not more.fits(spec.plan.available):
            return None
        trial = try_out(spec, more, demand, requests, seed)
        if trial.keeps:
            return trial
    return None


def _more(trial: Trial, limits: Sequence[Limit]) -> ClusterCandidate:
    """More of the role that misses its limit, by how far it does."""
    candidate = trial.candidate
    late = {limit.metric: trial.found[str(limit)] / limit.seconds for limit in limits}
    ttft, tpot = late.get("ttft", 0.0), max(late.get("tpot", 0.0), late.get("e2el", 0.0))
    busy = trial.result["prefill_busy"] > trial.result["decode_busy"]
    prefill = 0 if candidate.prefill is None else candidate.prefill.count
    decode = candidate.decode.count
    if candidate.prefill is not None and (ttft > max(1.0, tpot) or (max(ttft, tpot) <= 1 and busy)):
        prefill += max(1, ceil(_STEP * prefill))
    else:
        decode += max(1, ceil(_STEP * decode))
    return candidate.with_counts(prefill, decode)


def _fewer(spec: Spec, trial: Trial, demand: ServiceTarget, requests: int, seed: int) -> Trial:
    """Take replicas away while the objective is kept, of each role in turn."""
    for role in (1, 0):
        for _ in range(_TRIES):
            candidate = trial.candidate
            counts = [0 if candidate.prefill is None else candidate.prefill.count, candidate.decode.count]
            counts[role] -= max(1, int(_STEP * counts[role]))
            if counts[role] < 1:
                break
            less = try_out(spec, candidate.with_counts(*counts), demand, requests, seed)
            if not less.keeps:
                break
            trial = less
    return trial


def search(
    spec: Spec, demand: ServiceTarget, seed: int, on_trial: Callable[[str], None] = lambda _: None
) -> list[Trial]:
    """The cheapest of every kind that keeps the objective, cheapest first.

    Raises `ConfigError` if nothing does.
    """
    screened = candidates(spec, demand)
    if not screened:
        raise ConfigError("--slo: no instance, split and codec of the specification can keep it, by formulas")
    kinds = dict.fromkeys(one.kind for one in screened)
    kept = [[one for one in screened if one.kind == kind][:2] for kind in kinds]
    pool = sorted((one for some in kept for one in some), key=lambda one: one.usd)
    settled: dict[str, Trial] = {}
    for stay, requests in ROUNDS:
        trials = []
        for candidate in pool[: max(stay, len(kinds)) if requests == ROUNDS[0][1] else stay]:
            on_trial(f"{candidate.kind}: {requests} requests")
            trial = settle(spec, candidate, demand, requests, seed)
            if trial is not None:
                trials.append(trial)
                best = settled.get(candidate.kind)
                if best is None or requests > ROUNDS[0][1] or trial.usd < best.usd:
                    settled[candidate.kind] = trial
        if not trials:
            break
        trials.sort(key=lambda trial: trial.usd)
        pool = [trial.candidate for trial in trials]
    if not settled:
        raise ConfigError("--slo: nothing keeps it in the simulator with what can be had")
    return sorted(settled.values(), key=lambda trial: trial.usd)


def most(
    spec: Spec, demand: ServiceTarget, budget: float, seed: int, on_trial: Callable[[str], None] = lambda _: None
) -> list[Trial]:
    """What every kind serves at most for `budget` dollars per hour, the most first. Raises `ConfigError` if nothing."""
    trials = []
    for codec in spec.plan.codecs:
        for aggregated in (False, True)[: 1 + spec.plan.aggregated]:
            plan = spec.plan.model_copy(update={"codecs": (codec,)})
            candidate = _dearest(spec.model_copy(update={"plan": plan}), demand, budget, aggregated=aggregated)
            if candidate is None:
                continue
            on_trial(candidate[0].kind)
            trial = _fastest(spec, candidate[0], demand.at(candidate[1]), seed)
            if trial is not None:
                trials.append(trial)
    if not trials:
        raise ConfigError(f"--budget: {budget:g} $/h buys nothing that keeps the objective")
    return sorted(trials, key=lambda trial: trial.usd_per_request)


def _dearest(
    spec: Spec, demand: ServiceTarget, budget: float, *, aggregated: bool
) -> tuple[ClusterCandidate, float] | None:
    """The candidate of the highest rate that formulas serve within the budget, and that rate."""

    def at(rate: float) -> ClusterCandidate | None:
        found = candidates(spec, demand.at(rate), best=2)
        found = [one for one in found if (one.prefill is None) is aggregated and one.usd <= budget]
        return found[0] if found else None

    low, high = 0.0, 1e-3
    while at(high) is not None and high < _HIGHEST_RATE:
        low, high = high, high * 4
    if not low:
        return None
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) is not None else (low, middle)
    best = at(low)
    return None if best is None else (best, low)


def _fastest(spec: Spec, candidate: ClusterCandidate, demand: ServiceTarget, seed: int) -> Trial | None:
    """The highest rate at which a candidate keeps the objective, by bisection around what formulas say."""
    best: Trial | None = None
    low, high = 0.3, 1.7
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        trial = try_out(spec, candidate, demand.at(demand.rate * middle), ROUNDS[1][1], seed)
        if trial.keeps:
            best, low = trial, middle
        else:
            high = middle
    return best
