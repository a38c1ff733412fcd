"""Available machines that a plan leaves idle, and why."""

from __future__ import annotations

from sim.plan.parts import ClusterCandidate, Rig
from sim.plan.screen import Refusal, ServiceTarget, no_both, no_decode, no_prefill, rig_choice
from sim.plan.search import GAIN
from sim.spec import Spec


def idle(
    spec: Spec, demand: ServiceTarget, candidate: ClusterCandidate, budget: float | None
) -> list[tuple[str, str, str]]:
    """(instance, idle GPUs, why) for every instance of `plan.available` of which a plan uses fewer than all. `budget`
    is in dollars per hour; None if the rate is given."""
    rows = []
    for name, count in spec.plan.available.items():
        gpus = spec.tables.instances[name].gpus * count
        left = gpus - candidate.gpus.get(name, 0)
        if left:
            rows.append((name, f"{left} of {gpus}", _why(spec, demand, candidate, (name, left, budget))))
    return rows


def _why(spec: Spec, demand: ServiceTarget, candidate: ClusterCandidate, of: tuple[str, int, float | None]) -> str:
    name, left, budget = of
    able: list[Rig] = []
    words = []
    for role, answers in _answers(spec, demand, candidate, name).items():
        rigs = [rig for rig, refusal in answers if refusal is None]
        able += rigs
        if not rigs and answers:
            nearest = min((refusal for _, refusal in answers if refusal), key=lambda refusal: refusal.by)
            words.append(f"{role}: {nearest.why}")
    if able:
        words.append(_spare(able, left, candidate.usd, budget))
    return "; ".join(words) or "no role may use it"


def _spare(able: list[Rig], left: int, usd: float, budget: float | None) -> str:
    """Why the plan uses no more of the rigs that could serve."""
    small = min(rig.pool.gpus for rig in able)
    if small > left:
        return f"a replica takes {small} GPUs"
    if budget is None:
        return "the rate needs no more"
    if usd + min(rig.usd for rig in able if rig.pool.gpus <= left) > budget:
        return "the budget is spent"
    return f"no more steps of the search: each has to serve {GAIN - 1:.0%} more in the simulator"


def _answers(
    spec: Spec, demand: ServiceTarget, candidate: ClusterCandidate, name: str
) -> dict[str, list[tuple[Rig, Refusal | None]]]:
    """Role -> every split of the instance, and why it cannot serve the role."""
    choice = rig_choice(spec, candidate.codec)
    roles = (
        {"prefill": (choice.prefill, no_prefill), "decode": (choice.decode, no_decode)}
        if candidate.prefill
        else {"both": (choice.both, no_both)}
    )
    return {
        role: [(rig, why(rig, demand)) for rig in rigs if rig.pool.instance == name]
        for role, (rigs, why) in roles.items()
    }
