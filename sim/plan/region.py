"""The loads and links for which 2-bit codes win, by the formulas of the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hackkv.defaults import EXACT_CODEC
from measure.serve.shapes import Spread, fixed
from sim.plan.parts import ClusterCandidate
from sim.plan.screen import ServiceTarget, candidates, demand_of
from sim.spec import Efficiency, Spec

PROMPTS: Final = (512, 2_048, 8_192, 32_768)
LINKS_GBIT_S: Final = (2.0, 10.0, 50.0, 0.0)
"""Rates of the links; 0 stands for the instances' own line."""
TIE: Final = 0.02
"""Codecs within this share of the cheapest count as equal; the most exact of them wins."""
_EFFICIENCIES: Final = ("compute", "memory", "network")


@dataclass(frozen=True, slots=True)
class RegionCell:
    """The winner for one length and one link."""

    prompt: int
    link_gbit_s: float
    kind: str
    beside_fp16: float
    """Cost of the winner as a share of the best FP16 cluster's; NaN where FP16 cannot serve."""


def share_costs(spec: Spec, demand: ServiceTarget) -> dict[str, float]:
    """Kind -> dollars per hour of its cheapest cluster, in fractions of replicas, in the order of the specification.
    Limits on available machines do not count here."""
    free = spec.model_copy(update={"plan": spec.plan.model_copy(update={"available": {}})})
    found = candidates(free, demand, best=1)
    order = [codec.label for codec in spec.plan.codecs]
    best: dict[str, ClusterCandidate] = {}
    for one in found:
        if one.kind not in best or one.share_usd < best[one.kind].share_usd:
            best[one.kind] = one
    kinds = sorted(best, key=lambda kind: (order.index(best[kind].codec.label), not best[kind].prefill))
    return {kind: best[kind].share_usd for kind in kinds}


def winner(costs: dict[str, float]) -> str:
    """The first kind within `TIE` of the cheapest; empty if there is no kind."""
    least = min(costs.values(), default=0.0)
    return next((kind for kind, cost in costs.items() if cost <= least * (1 + TIE)), "")


def region(spec: Spec, demand: ServiceTarget) -> list[RegionCell]:
    """The winner at every length and link. Outputs are as long as the load's; limits on TTFT grow with the prompt."""
    cells = []
    for prompt in PROMPTS:
        grown = max(1.0, prompt / demand.prompt)
        limits = tuple(
            limit if limit.metric == "tpot" else type(limit)(limit.metric, limit.percent, limit.seconds * grown)
            for limit in demand.limits
        )
        shape = fixed(prompt, max(1, round(demand.output)))
        for link in LINKS_GBIT_S:
            network = spec.network.model_copy(update={"link_gbit_s": link})
            part = spec.model_copy(update={"network": network})
            costs = share_costs(part, demand_of(part, demand.rate, limits, shape))
            kind = winner(costs)
            fp16 = min((cost for name, cost in costs.items() if name.startswith(EXACT_CODEC)), default=float("nan"))
            cells.append(RegionCell(prompt, link, kind, costs[kind] / fp16 if kind else float("nan")))
    return cells


def sensitivity(spec: Spec, demand: ServiceTarget, kind: str) -> list[tuple[str, float, float]]:
    """(efficiency, cost with 20% less of it, cost with 20% more), as shares of the present cost of `kind`."""
    now = share_costs(spec, demand).get(kind, float("nan"))
    rows = []
    for name in _EFFICIENCIES:
        ends = []
        for factor in (0.8, 1.2):
            value = min(1.0, getattr(spec.efficiency, name) * factor)
            efficiency = Efficiency.model_validate({**spec.efficiency.model_dump(), name: value})
            costs = share_costs(spec.model_copy(update={"efficiency": efficiency}), demand)
            ends.append(costs.get(kind, float("nan")) / now)
        rows.append((name, ends[0], ends[1]))
    return rows


def upgrades(spec: Spec, demand: ServiceTarget, kind: str) -> list[tuple[str, float]]:
    """(what gets 20% better on every GPU or link, cost as a share of the present one), largest gain first."""
    now = share_costs(spec, demand).get(kind, float("nan"))
    tables = spec.tables
    names: Sequence[tuple[str, str]] = (
        ("FLOP/s", "fp16_tflops"),
        ("memory's rate", "memory_gb_s"),
        ("memory's size", "memory_gb"),
        ("bus between GPUs", "bus_gb_s"),
    )
    found = []
    for words, field in names:
        gpus = {name: gpu.model_copy(update={field: 1.2 * getattr(gpu, field)}) for name, gpu in tables.gpus.items()}
        found.append((words, spec.model_copy(update={"catalogue": tables.model_copy(update={"gpus": gpus})})))
    instances = {
        name: one.model_copy(update={"network_gbit_s": 1.2 * one.network_gbit_s, "flow_gbit_s": 1.2 * one.flow_gbit_s})
        for name, one in tables.instances.items()
    }
    wider = spec.model_copy(
        update={
            "catalogue": tables.model_copy(update={"instances": instances}),
            "network": spec.network.model_copy(update={"link_gbit_s": 1.2 * spec.network.link_gbit_s}),
        }
    )
    found.append(("network", wider))
    costs = [(words, share_costs(changed, demand).get(kind, float("nan")) / now) for words, changed in found]
    return sorted(costs, key=lambda row: row[1])


def spread_of(spread: Spread) -> str:
    """A spread in words, for the report."""
    return f"{spread.mean:g} ({spread.low:g} to {spread.high:g})"
