"""Formulas that estimate in a millisecond how many replicas a load takes.

    prefill   c replicas with rho = rate E[S] / c <= RHO, and p90(S) + 2.3 W within the limit on TTFT (W: M/G/c wait);
              no line busier than LINE
    decode    the largest batch b whose step keeps 90% of the limit on TPOT and whose KV fits; rate o step(b) / (b RHO)
              replicas
    both      aggregated: a replica's time is prompts and steps, and every step may carry a chunk

The simulator corrects what the formulas leave out. Roles do not depend on each other but for the sender's line, so the
best of each are combined. If the number of instances is limited, a role may also mix kinds (`sim.plan.mix`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from measure.serve.shapes import Shape
from sim.paper.model import erlang_wait
from sim.plan.mix import best_of_each, cheapest_mix
from sim.plan.objective import Limit, tightest
from sim.plan.parts import MOST, ClusterCandidate, Part, Rig
from sim.spec import Codec, ReplicaPool, Spec
from sim.workload import shape_of
from sim.worth import largest_batch

RHO: Final = 0.85
LINE: Final = 0.7
_SAMPLES: Final = 60
_TAIL: Final = math.log(10)
"""p90 of an exponential wait, in means."""
_TPOT_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """The load to serve and the limits to keep."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    rate: float
    limits: tuple[Limit, ...]

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(np.mean(self.prompts))

    @property
    def output(self) -> float:
        """Mean tokens of an output."""
        return float(np.mean(self.outputs))

    @property
    def longest(self) -> int:
        """The most tokens that one request can have."""
        return max(self.prompts) + max(self.outputs)

    def at(self, rate: float) -> ServiceTarget:
        """The same target at another rate."""
        return replace(self, rate=rate)


def demand_of(spec: Spec, rate: float, limits: Sequence[Limit], shape: Shape | None = None) -> ServiceTarget:
    """A sample of the specification's load, or of another shape."""
    rng = np.random.default_rng(0)
    shape = shape or shape_of(spec.load)
    prompts, outputs = shape.prompt.draw(_SAMPLES, rng), shape.output.draw(_SAMPLES, rng)
    return ServiceTarget(tuple(prompts), tuple(outputs), rate, tuple(limits))


def rigs(spec: Spec, base: ReplicaPool, names: Sequence[str], codec: Codec) -> Iterator[Rig]:
    """Every instance and split over its GPUs that is allowed. A stage does not leave its instance."""
    for name in names or (base.instance,):
        for tp in spec.plan.tp:
            for pp in spec.plan.pp:
                pool = base.model_copy(update={"instance": name, "tp": tp, "pp": pp, "replicas": 1})
                if tp <= spec.instance_of(pool).gpus and spec.shape.layers % pp == 0:
                    yield Rig(spec, pool, codec)


class Refusal(NamedTuple):
    """Why a rig cannot serve a role."""

    why: str
    by: float
    """How far the rig misses its limit, as a factor; infinite if something does not fit."""


_NO_ROOM: Final = Refusal("weights and the longest request do not fit", math.inf)


@cache
def _service(rig: Rig, prompts: tuple[int, ...]) -> tuple[float, float, float]:
    """Mean, squared coefficient of variation and p90 of a prompt's seconds."""
    times = np.array([rig.prompt_s(tokens) for tokens in prompts])
    return float(times.mean()), float(times.var() / times.mean() ** 2), float(np.percentile(times, 90))


def no_prefill(rig: Rig, demand: ServiceTarget) -> Refusal | None:
    """Why a rig cannot compute prompts; None if it can."""
    if not rig.holds(max(demand.prompts), by_host=True):
        return _NO_ROOM
    p90, limit = _service(rig, demand.prompts)[2], tightest(demand.limits, "ttft")
    if p90 > limit:
        return Refusal(f"a prompt takes {p90:.3g} s (p90), and TTFT may be {limit:g} s", p90 / limit)
    return None


def no_decode(rig: Rig, demand: ServiceTarget) -> Refusal | None:
    """Why a rig cannot decode; None if it can."""
    if not rig.holds(demand.longest, by_host=False):
        return _NO_ROOM
    if best_batch(rig, demand)[0]:
        return None
    limit = _TPOT_SHARE * tightest(demand.limits, "tpot")
    alone_s = rig.cost.decode(1).seconds(round(demand.prompt), 1)
    return Refusal(
        f"a decode step of one sequence takes {1e3 * alone_s:.3g} ms, and {1e3 * limit:.3g} ms keep the limit on TPOT",
        alone_s / limit,
    )


def prefill_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """The replicas that prompts take; None if no number suffices."""
    if no_prefill(rig, demand) is not None:
        return None
    mean, cv2, p90 = _service(rig, demand.prompts)
    limit = tightest(demand.limits, "ttft")
    by_line = demand.rate * _mean_bytes(rig, demand) / (LINE * rig.line)
    least = max(demand.rate * mean / RHO, by_line)

    def keeps(count: float) -> bool:
        whole = max(1, round(count))
        load = min(demand.rate * mean / count, 0.99)
        return p90 + _TAIL * (1 + cv2) / 2 * mean * erlang_wait(load, whole) <= limit

    count = least
    while not keeps(count) and count < MOST:
        count = max(count * 1.05, count + (0.25 if count > 4 else 0.1))
    word = "line of the prefill replicas" if by_line >= demand.rate * mean / RHO else "prefill compute"
    return Part(rig, count, word, count) if count < MOST else None


def _mean_bytes(rig: Rig, demand: ServiceTarget) -> float:
    sizes = rig.sizes
    return float(np.mean([sizes.footprint.wire_bytes(sizes.rows_held(tokens)) for tokens in demand.prompts]))


def best_batch(rig: Rig, demand: ServiceTarget, beside_s: float = 0.0) -> tuple[int, float, str]:
    """(largest batch that keeps the limit on TPOT, seconds of its step, what bounds it); batch 0 if none does."""
    footprint, rows = rig.sizes.footprint, [rig.sizes.rows_held(tokens) for tokens in demand.prompts]
    held = float(np.mean([footprint.sealed(n + o) for n, o in zip(rows, demand.outputs, strict=True)]))
    by_memory = int(rig.pages / max(1.0, held))
    most = max(0, min(rig.pool.max_batch, rig.pool.max_sequences, by_memory))
    limit = _TPOT_SHARE * tightest(demand.limits, "tpot")
    context = float(np.mean(rows)) + demand.output / 2

    def step_s(batch: int) -> float:
        return rig.cost.decode(batch).seconds(round(batch * context), 1) + beside_s

    low = largest_batch(step_s, most, limit)
    word = "memory's rate in decode" if low < most else "room for KV" if most == by_memory else "size of a batch"
    return low, step_s(low) if low else 0.0, word


def decode_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """The replicas that decoding takes; None if no number suffices."""
    if no_decode(rig, demand) is not None:
        return None
    batch, step_s, word = best_batch(rig, demand)
    by_steps = demand.rate * demand.output * step_s / (batch * RHO)
    by_line = demand.rate * _mean_bytes(rig, demand) / (LINE * rig.line)
    count = max(by_steps, by_line)
    return Part(rig, count, "line of the decode replicas" if by_line > by_steps else word, count)


def no_both(rig: Rig, demand: ServiceTarget) -> Refusal | None:
    """Why a rig cannot do both roles; None if it can."""
    if not rig.holds(demand.longest, by_host=False):
        return _NO_ROOM
    chunk_s = _chunk_s(rig, demand)
    batch, step_s, _ = best_batch(rig, demand, chunk_s)
    limit = _TPOT_SHARE * tightest(demand.limits, "tpot")
    if not batch:
        alone_s = chunk_s + rig.cost.decode(1).seconds(round(demand.prompt), 1)
        words = f"a step beside a prompt takes {1e3 * alone_s:.3g} ms, and {1e3 * limit:.3g} ms keep the limit on TPOT"
        return Refusal(words, alone_s / limit)
    ttft_s, limit = _service(rig, demand.prompts)[2] + step_s, tightest(demand.limits, "ttft")
    if ttft_s > limit:
        return Refusal(f"a prompt takes {ttft_s:.3g} s (p90), and TTFT may be {limit:g} s", ttft_s / limit)
    return None


def _chunk_s(rig: Rig, demand: ServiceTarget) -> float:
    return rig.cost.prefill([(round(demand.prompt / 2), min(rig.pool.chunk_tokens, round(demand.prompt)))]).seconds


def both_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """The replicas that do both roles and that a load takes; None if no number suffices."""
    if no_both(rig, demand) is not None:
        return None
    mean, chunk_s = _service(rig, demand.prompts)[0], _chunk_s(rig, demand)
    batch, step_s, word = best_batch(rig, demand, chunk_s)
    count = demand.rate * (mean + demand.output * (step_s - chunk_s) / batch) / RHO
    return Part(rig, count, word, count)


@dataclass(frozen=True, slots=True)
class RigChoice:
    """All rigs that a specification allows for one codec."""

    codec: Codec
    prefill: tuple[Rig, ...]
    decode: tuple[Rig, ...]
    both: tuple[Rig, ...]


def rig_choice(spec: Spec, codec: Codec) -> RigChoice:
    """The rigs of every role. If `plan` names no instances for a role, those of the specification's pools are used."""
    base, decode = (spec.prefill or spec.decode)[0], spec.decode[0]
    first = spec.plan.prefill or _instances(spec.prefill or spec.decode)
    second = spec.plan.decode or _instances(spec.decode)
    names = tuple(dict.fromkeys((*spec.plan.prefill, *spec.plan.decode))) or second
    chunk = decode.model_copy(update={"chunk_tokens": min(512, decode.chunk_tokens)})
    return RigChoice(
        codec,
        tuple(rigs(spec, base, first, codec)),
        tuple(rigs(spec, decode, second, codec)),
        tuple(rigs(spec, chunk, names, codec)) if spec.plan.aggregated else (),
    )


def _instances(pools: Sequence[ReplicaPool]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pool.instance for pool in pools))


def candidates(spec: Spec, demand: ServiceTarget, best: int = 3) -> list[ClusterCandidate]:
    """The best clusters of every codec, cheapest first; empty if nothing suffices."""
    found = [one for codec in spec.plan.codecs for one in candidates_of(rig_choice(spec, codec), demand, best)]
    return sorted(found, key=lambda one: one.usd)


def candidates_of(choice: RigChoice, demand: ServiceTarget, best: int = 3) -> list[ClusterCandidate]:
    """The best clusters of one codec, cheapest first."""
    can = choice.decode[0].spec.plan.available if choice.decode else {}
    prefills = [part for rig in choice.prefill if (part := prefill_part(rig, demand))]
    decodes = [part for rig in choice.decode if (part := decode_part(rig, demand))]
    both = [part for rig in choice.both if (part := both_part(rig, demand))]
    codec = choice.codec
    found = [
        ClusterCandidate(codec, (first,), (second,))
        for first in _cheapest(prefills, best, can)
        for second in _cheapest(decodes, best, can)
    ]
    found += [ClusterCandidate(codec, (), (part,)) for part in _cheapest(both, best, can)]
    found += _mixed(codec, prefills, decodes, can)
    found += _mixed(codec, None, both, can)
    return sorted((one for one in found if one.fits(can)), key=lambda one: one.usd)


def by_instance(choice: RigChoice, demand: ServiceTarget, *, aggregated: bool) -> tuple[list[Part], list[Part]]:
    """The best split of every instance, for prefill and for decode."""
    if aggregated:
        return [], best_of_each((part for rig in choice.both if (part := both_part(rig, demand))), 1)
    prefills = (part for rig in choice.prefill if (part := prefill_part(rig, demand)))
    decodes = (part for rig in choice.decode if (part := decode_part(rig, demand)))
    return best_of_each(prefills, 1), best_of_each(decodes, 1)


def _mixed(
    codec: Codec, prefills: list[Part] | None, decodes: list[Part], can: dict[str, int]
) -> list[ClusterCandidate]:
    """The cheapest cluster of kinds for each role, if it mixes kinds; else no cluster. Without limits on available
    machines a mix is never cheaper."""
    roles = [decodes] if prefills is None else [prefills, decodes]
    if not can or not all(roles) or len({part.rig.pool.instance for role in roles for part in role}) == 1:
        return []
    mix = cheapest_mix(roles, can)
    if mix is None:
        return []
    one = ClusterCandidate(codec, () if prefills is None else mix[0], mix[-1])
    return [one] if one.is_mixed else []


def _cheapest(parts: Iterable[Part], count: int, available: dict[str, int]) -> list[Part]:
    found = [part for part in parts if ClusterCandidate(part.rig.codec, (), (part,)).fits(available)]
    return sorted(found, key=lambda part: (part.usd, part.share_usd))[:count]
