"""From candidates to a plan: the simulator finds the replica counts, and successive halving keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from hackkv.errors import ConfigError
from sim.cluster import Options
from sim.plan.objective import Limit
from sim.plan.parts import ClusterCandidate, Part, Rig
from sim.plan.screen import RigChoice, ServiceTarget, by_instance, candidates, candidates_of, rig_choice
from sim.shards import simulate
from sim.spec import Spec
from sim.summary import summarize
from sim.workload import synthetic

ROUNDS: Final = ((12, 400), (6, 1_200), (3, 4_000))
"""For each round: how many candidates stay, and how many requests each is tried with."""
_PER_REPLICA: Final = 12
"""The least number of requests for each replica: a fleet has to fill before it can be judged."""
_TRIES: Final = 12
_HALVINGS: Final = 10
_HIGHEST_RATE: Final = 1e7
GAIN: Final = 1.02
"""A change of a cluster is kept if it serves at least this multiple of the rate before."""
_CLIMB: Final = 1.3
"""The largest multiple of the rate that a change is expected to serve."""
STYLES: Final = ((False, False), (False, True), (True, False), (True, True))
"""(replicas do both roles, a role has several kinds of replicas)"""
_STEP: Final = 0.08
"""Share of replicas that one try adds or removes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a candidate in the simulator."""

    candidate: ClusterCandidate
    rate: float
    """Requests per second."""
    found: dict[str, float]
    """Limit -> the value in the simulation, in seconds."""
    keeps: bool
    result: dict[str, Any]
    """The result as `hackkv simulate` writes it."""

    @property
    def usd(self) -> float:
        """Dollars per hour."""
        return self.candidate.usd

    @property
    def usd_per_request(self) -> float:
        """Dollars per request at this rate."""
        return self.usd / 3600 / self.rate


def spec_of(spec: Spec, candidate: ClusterCandidate, rate: float, requests: int) -> Spec:
    """The candidate as a specification to simulate. All replicas run all the time, since a plan is for the largest
    load (`sim.plan.following` has `scale`)."""
    roles = [
        tuple(part.rig.pool.model_copy(update={"replicas": part.count, "scale": None}) for part in parts)
        for parts in (candidate.prefill, candidate.decode)
    ]
    load = spec.load.model_copy(update={"rate": rate, "requests": requests, "concurrency": 0, "ramp_to": 0.0})
    shards = max(1, min(sum(pool.replicas for pool in pools) for pools in roles if pools) // 32)
    return spec.model_copy(
        update={
            "prefill": roles[0],
            "decode": roles[1],
            "codec": candidate.codec,
            "load": load,
            "policy": spec.policy.model_copy(update={"shards": shards}),
        }
    )


def try_out(spec: Spec, candidate: ClusterCandidate, demand: ServiceTarget, requests: int, seed: int) -> Trial:
    """Simulate a candidate; all candidates see the same requests."""
    replicas = sum(part.count for part in candidate.parts)
    whole = spec_of(spec, candidate, demand.rate, max(requests, _PER_REPLICA * replicas))
    record = simulate(whole, synthetic(whole.load, seed), Options(seed=seed))
    found = {str(limit): limit.found(record.rows) for limit in demand.limits}
    result = summarize(record, candidate.label)
    keeps = all(found[str(limit)] <= limit.seconds for limit in demand.limits) and not result["unstable"]
    return Trial(candidate, demand.rate, found, keeps, result)


def settle(spec: Spec, candidate: ClusterCandidate, demand: ServiceTarget, requests: int, seed: int) -> Trial | None:
    """The fewest replicas of a candidate's rigs that keep the objective, by steps from the count of the formulas; None
    if that takes more than can be had."""
    trial = try_out(spec, candidate, demand, requests, seed)
    for _ in range(_TRIES):
        if trial.keeps:
            return _fewer(spec, trial, demand, requests, seed)
        more = _more(spec, trial, demand.limits)
        if more is None:
            return None
        trial = try_out(spec, more, demand, requests, seed)
    return _fewer(spec, trial, demand, requests, seed) if trial.keeps else None


def _more(spec: Spec, trial: Trial, limits: Sequence[Limit]) -> ClusterCandidate | None:
    """The cluster with more replicas of the role that misses its limit by most, of the kind that serves it at least
    cost; None if no more can be had."""
    candidate = trial.candidate
    late = {limit.metric: trial.found[str(limit)] / limit.seconds for limit in limits}
    ttft, tpot = late.get("ttft", 0.0), max(late.get("tpot", 0.0), late.get("e2el", 0.0))
    busy = trial.result["prefill_busy"] > trial.result["decode_busy"]
    cut = len(candidate.prefill)
    short_of_prefill = bool(cut) and (ttft > max(1.0, tpot) or (max(ttft, tpot) <= 1 and busy))
    first, role = (0, candidate.prefill) if short_of_prefill else (cut, candidate.decode)
    replicas = sum(part.count for part in role)
    for part in sorted(role, key=lambda part: part.role_usd):
        more = candidate.changed(first + role.index(part), max(1, ceil(_STEP * replicas)))
        if more is not None and more.fits(spec.plan.available):
            return more
    return None


def _fewer(spec: Spec, trial: Trial, demand: ServiceTarget, requests: int, seed: int) -> Trial:
    """Remove replicas while the objective is kept: of decode first, then of prefill, and in a role the kind that is
    dearest for what it serves. This repeats until nothing changes, since a smaller role may let the other shrink."""
    rigs = [part.rig for side in (trial.candidate.decode, trial.candidate.prefill) for part in _dearest_first(side)]
    before: ClusterCandidate | None = None
    while before is not trial.candidate:
        before = trial.candidate
        for rig in rigs:
            trial = _fewer_of(spec, trial, rig, (demand, requests, seed))
    return trial


def _fewer_of(spec: Spec, trial: Trial, rig: Rig, of: tuple[ServiceTarget, int, int]) -> Trial:
    for _ in range(_TRIES):
        parts = trial.candidate.parts
        index = next((place for place, part in enumerate(parts) if part.rig is rig), None)
        less = None if index is None else trial.candidate.changed(index, -max(1, int(_STEP * parts[index].count)))
        tried = None if less is None else try_out(spec, less, *of)
        if tried is None or not tried.keeps:
            break
        trial = tried
    return trial


def _dearest_first(role: Sequence[Part]) -> list[Part]:
    return sorted(role, key=lambda part: -part.role_usd)


def search(
    spec: Spec, demand: ServiceTarget, seed: int, on_trial: Callable[[str], None] = lambda _: None
) -> list[Trial]:
    """The cheapest cluster of every kind that keeps the objective, cheapest first.

    Raises `ConfigError` if nothing does.
    """
    screened = candidates(spec, demand)
    if not screened:
        raise ConfigError("--slo: no instance, split and codec of the specification can keep it, by formulas")
    kinds = dict.fromkeys(one.label for one in screened)
    kept = [[one for one in screened if one.label == kind][:2] for kind in kinds]
    pool = sorted((one for some in kept for one in some), key=lambda one: one.usd)
    settled: dict[str, Trial] = {}
    for stay, requests in ROUNDS:
        trials = []
        for candidate in pool[: max(stay, len(kinds)) if requests == ROUNDS[0][1] else stay]:
            on_trial(f"{candidate.label}: {requests} requests")
            trial = settle(spec, candidate, demand, requests, seed)
            if trial is not None:
                trials.append(trial)
                label = trial.candidate.label  # a mix that ends with one kind has another label than before
                best = settled.get(label)
                if best is None or requests > ROUNDS[0][1] or trial.usd < best.usd:
                    settled[label] = trial
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
    """The most that every kind serves for `budget` dollars per hour, fastest first. Raises `ConfigError` if none is."""
    best: dict[str, Trial] = {}
    for codec in spec.plan.codecs:
        choice = rig_choice(spec, codec)
        for aggregated, mixed in STYLES:
            found = _dearest(choice, demand, budget, aggregated=aggregated, mixed=mixed)
            if found is None:
                continue
            candidate, rate = found
            on_trial(candidate.label)
            trial = fastest(spec, candidate, demand.at(rate), seed)
            if trial is None:
                continue
            others = by_instance(choice, demand.at(rate), aggregated=aggregated) if mixed else ([], [])
            trial = climb(spec, trial, Scope(demand, budget, seed, others))
            label = trial.candidate.label
            best[label] = max(best.get(label, trial), trial, key=lambda one: one.rate)
    if not best:
        raise ConfigError(f"--budget: {budget:g} $/h buys nothing that keeps the objective")
    return sorted(best.values(), key=lambda trial: -trial.rate)


def _dearest(
    choice: RigChoice, demand: ServiceTarget, budget: float, *, aggregated: bool, mixed: bool
) -> tuple[ClusterCandidate, float] | None:
    """The candidate of the highest rate that formulas serve within the budget, and that rate. None if no candidate
    does, or if kinds may be mixed and the best candidate is not mixed."""

    def at(rate: float) -> ClusterCandidate | None:
        found = [
            one
            for one in candidates_of(choice, demand.at(rate), best=2)
            if bool(one.prefill) is not aggregated and one.usd <= budget and (mixed or not one.is_mixed)
        ]
        return found[0] if found else None

    low, high = 0.0, 1e-3
    while at(high) is not None and high < _HIGHEST_RATE:
        low, high = high, high * 4
    if not low:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) is not None else (low, middle)
    best = at(low)
    return None if best is None or best.is_mixed is not mixed else (best, low)


def fastest(
    spec: Spec,
    candidate: ClusterCandidate,
    demand: ServiceTarget,
    seed: int,
    within: tuple[float, float] = (0.3, 1.7),
    halvings: int = 6,
) -> Trial | None:
    """The highest rate at which a candidate keeps the objective (its goodput), by bisection. `within` are the ends of
    the range, as shares of the demand's rate."""
    best: Trial | None = None
    low, high = within
    for _ in range(halvings):
        middle = (low + high) / 2
        trial = try_out(spec, candidate, demand.at(demand.rate * middle), ROUNDS[1][1], seed)
        if trial.keeps:
            best, low = trial, middle
        else:
            high = middle
    return best


@dataclass(frozen=True, slots=True)
class Scope:
    """The bounds within which a cluster may be changed."""

    demand: ServiceTarget
    budget: float
    """Dollars per hour."""
    seed: int
    others: tuple[list[Part], list[Part]]
    """Kinds that may join: (for prefill, for decode)."""


def climb(spec: Spec, trial: Trial, scope: Scope) -> Trial:
    """Change a cluster as long as a change serves `GAIN` times as much within the budget. Formulas add up what each
    role serves alone; only the simulator knows how roles wait for each other."""
    for _ in range(_TRIES):
        more = scope.demand.at(trial.rate * GAIN)
        better = None
        for other in _neighbours(trial.candidate, scope.others):
            if other.usd > scope.budget or not other.fits(spec.plan.available):
                continue
            tried = try_out(spec, other, more, ROUNDS[1][1], scope.seed)
            if tried.keeps:
                better = fastest(spec, other, more, scope.seed, (1.0, _CLIMB)) or tried
                break
        if better is None:
            break
        trial = better
    return trial


def _neighbours(candidate: ClusterCandidate, others: tuple[list[Part], list[Part]]) -> Iterator[ClusterCandidate]:
    """Clusters that differ by one change: more replicas of a kind that is there, one replica of another kind, or
    replicas of one part in exchange for those of another."""
    parts = candidate.parts
    for index, part in enumerate(parts):
        more = candidate.changed(index, _step(part))
        if more is not None:
            yield more
    for part in others[0]:
        yield candidate.joined(part, prefill=True)
    for part in others[1]:
        yield candidate.joined(part, prefill=False)
    for index, part in enumerate(parts):
        for place, other in enumerate(parts):
            for by in {_step(other), max(1, _step(part) * part.rig.pool.gpus // other.rig.pool.gpus)}:
                moved = None if place == index else candidate.moved(index, place, (_step(part), by))
                if moved is not None:
                    yield moved


def _step(part: Part) -> int:
    return max(1, int(_STEP * part.count))
