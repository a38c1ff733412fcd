"""A plan as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hackkv.defaults import EXACT_CODEC
from sim.paper.tables import table
from sim.plan.following import LOW, FollowedLoad
from sim.plan.idle import idle
from sim.plan.parts import Part
from sim.plan.region import LINKS_GBIT_S, PROMPTS, TIE, region, sensitivity, spread_of, upgrades
from sim.plan.screen import ServiceTarget
from sim.plan.search import Trial
from sim.spec import Spec
from sim.workload import shape_of


def report(
    spec: Spec,
    demand: ServiceTarget,
    trials: list[Trial],
    command: str,
    budget: float | None = None,
    followed: FollowedLoad | None = None,
) -> Iterator[str]:
    """The lines of plan.md. `budget` is in dollars per hour for one cell."""
    best = trials[0]
    yield from _head(spec, demand, best, command)
    yield from _kinds(spec, trials)
    yield from _best(best)
    if followed is not None:
        yield from _followed(best, followed)
    yield from _idle(spec, demand, best, budget)
    yield from _changes(spec, demand, best)
    yield from _region(spec, demand)
    yield "## How far to trust it"
    yield ""
    yield (
        "Durations are a roofline at the efficiencies of the specification, not measurements; `profile` of a "
        "pool replaces them by measured ones. Decisions are the live router's and schedulers' own. TTFT ends "
        "when the client has token 0, TPOT is (JCT - TTFT) / (tokens - 1). What a codec costs in accuracy is not "
        "in here: `hackkv eval --recommend MODEL` measures it, and few bits can ruin a small model. Prices are the "
        "catalogue's."
    )


def _head(spec: Spec, demand: ServiceTarget, best: Trial, command: str) -> Iterator[str]:
    shape, cells = shape_of(spec.load), spec.plan.cells
    model = spec.model if isinstance(spec.model, str) else "the model"
    yield f"# {model}: {cells * best.rate:.4g} requests/s"
    yield ""
    yield f"`{command}`"
    yield ""
    yield (
        f"Prompts of {spread_of(shape.prompt)} tokens, outputs of {spread_of(shape.output)}; "
        f"{', '.join(map(str, demand.limits))}. Formulas screened instances and splits; the best of every kind were "
        "simulated with the same requests."
    )
    yield ""
    if cells > 1:
        yield f"The load is served by {cells} equal cells; everything below but the next line is one cell's."
        yield ""
    yield f"**{_describe(best)}: ${cells * best.usd:,.2f}/h, ${best.usd_per_request:.5f} per request.**"
    yield ""


def _describe(trial: Trial) -> str:
    candidate = trial.candidate
    purposes = [" for prefill"] * len(candidate.prefill)
    purposes += [" for decode" if candidate.prefill else " for both"] * len(candidate.decode)
    machines = [
        f"{part.count} x {part.rig.pool.gpus} GPUs ({part.rig}){purpose}"
        for part, purpose in zip(candidate.parts, purposes, strict=True)
    ]
    return f"{'; '.join(machines)}; {candidate.codec.label}"


def _side(parts: Sequence[Part]) -> str:
    return " + ".join(map(str, parts)) or "-"


def _kinds(spec: Spec, trials: list[Trial]) -> Iterator[str]:
    yield "## The cheapest of every kind that keeps the objective"
    yield ""
    limits = list(trials[0].found)
    rows = []
    for trial in trials:
        prefill, decode = trial.candidate.prefill, trial.candidate.decode
        rows.append(
            (
                trial.candidate.label,
                _side(prefill),
                _side(decode),
                f"{trial.rate:.4g}",
                f"{trial.usd:,.2f}",
                f"{trial.usd_per_request / trials[0].usd_per_request:.2f}",
                *(f"{trial.found[limit]:.3g}" for limit in limits),
                f"{trial.result['prefill_busy']:.0%} / {trial.result['decode_busy']:.0%}"
                if prefill
                else f"{trial.result['decode_busy']:.0%}",
                f"{trial.result['pages_peak']:.0%}",
            )
        )
    head = (
        "codec",
        "prefill",
        "decode",
        "requests/s",
        "$/h",
        "$ per request beside the best",
        *limits,
        "busy",
        "pages at peak",
    )
    yield from table(head, rows)
    missing = {codec.label for codec in spec.plan.codecs} - {trial.candidate.codec.label for trial in trials}
    if missing:
        yield f"Nothing keeps the objective with {', '.join(sorted(missing))}."
        yield ""


def _best(best: Trial) -> Iterator[str]:
    result = best.result
    yield "## The best one"
    yield ""
    prefill, decode = (sum(part.count for part in parts) for parts in (best.candidate.prefill, best.candidate.decode))
    words = "; ".join(dict.fromkeys(part.bottleneck for part in best.candidate.parts))
    if prefill:
        yield f"- {prefill} : {decode} prefill to decode replicas ({prefill / decode:.2g} : 1)."
        yield f"- Bottlenecks by formula: {words}."
    else:
        yield f"- Bottleneck by formula: {words}."
    yield f"- Mean batch of a decode step: {result['decode_batch']:.1f}; busiest line {result['link_used']:.0%}."
    stages = ", ".join(
        f"{stage} {values['mean']:,.0f}" for stage, values in result["stages"].items() if values["mean"] >= 0.5
    )
    yield f"- Stages of a request, mean ms: {stages}; JCT {result['mean_e2el_ms']:,.0f}."
    yield ""
    if best.candidate.is_mixed:
        yield from _shares(best)


def _shares(best: Trial) -> Iterator[str]:
    """The work of each kind, where a role has several. The router counts tokens, whatever the speed of a replica."""
    pools = best.result["pools"]
    done = {role: sum(pool["tokens"] for pool in pools if pool["role"] == role) for role in ("prefill", "decode")}
    rows = [
        (
            pool["role"],
            f"{pool['replicas']} x {part.rig}",
            f"{pool['tokens'] / max(1, done[pool['role']]):.0%}",
            f"{pool['busy']:.0%}",
        )
        for pool, part in zip(pools, best.candidate.parts, strict=True)
    ]
    yield from table(("role", "replicas", "of the role's tokens", "busy"), rows)


def _followed(best: Trial, followed: FollowedLoad) -> Iterator[str]:
    yield "## When replicas follow the load"
    yield ""
    limits = ", ".join(f"{limit}: {seconds:.3g} s" for limit, seconds in followed.found.items())
    yield (
        f"The counts are for {best.rate:.4g} requests/s. Here the load rises from {LOW:.0%} of that to all of it in "
        f"{followed.seconds / 60:.0f} minutes, and replicas start as `scale` says, the kind of least cost per goodput "
        f"first. What runs costs ${followed.usd_per_hour:,.2f}/h in the mean, {followed.usd_per_hour / best.usd:.0%} "
        f"of all. {limits}."
    )
    yield ""
    rows = ((role, str(part), f"{count:.1f}") for role, part, count in followed.running)
    yield from table(("role", "replicas, in the order in which they start", "running in the mean"), rows)


def _idle(spec: Spec, demand: ServiceTarget, best: Trial, budget: float | None) -> Iterator[str]:
    rows = idle(spec, demand, best.candidate, budget)
    if not spec.plan.available:
        return
    yield "## What stays idle"
    yield ""
    if rows:
        yield from table(("instance", "idle GPUs", "why"), rows)
    else:
        yield "Nothing: every GPU that can be had is used."
        yield ""


def _changes(spec: Spec, demand: ServiceTarget, best: Trial) -> Iterator[str]:
    kind = best.candidate.kind
    yield "## What to upgrade next, and what it hangs on"
    yield ""
    yield (
        "By formulas, in fractions of replicas: cost beside the present one with 20% more of one thing on all "
        "machines, and with 20% less or more of what an engine reaches of the rated speeds."
    )
    yield ""
    yield from table(("20% more of", "cost"), ((words, f"{cost:.3f}") for words, cost in upgrades(spec, demand, kind)))
    rows = [(name, f"{less:.3f}", f"{more:.3f}") for name, less, more in sensitivity(spec, demand, kind)]
    yield from table(("efficiency", "20% less", "20% more"), rows)


def _region(spec: Spec, demand: ServiceTarget) -> Iterator[str]:
    yield "## Where which codec wins"
    yield ""
    yield (
        f"The cheapest kind by formulas, and its cost beside the best cluster with exact KV (`{EXACT_CODEC}`), "
        f"aggregated or not. Kinds within {TIE:.0%} of the cheapest count as equal, and the most exact of them is "
        "named: where it stands, fewer bits gain nothing. Limits on TTFT grow with the prompt."
    )
    yield ""
    cells = {(cell.prompt, cell.link_gbit_s): cell for cell in region(spec, demand)}
    rows = []
    for prompt in PROMPTS:
        found = [cells[prompt, link] for link in LINKS_GBIT_S]
        rows.append((f"{prompt:,}", *(f"{one.kind} {one.beside_fp16:.2f}" if one.kind else "none" for one in found)))
    yield from table(("prompt", *(f"{link:g} Gbit/s" if link else "instances' own" for link in LINKS_GBIT_S)), rows)
