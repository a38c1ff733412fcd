"""Formulas that say in a millisecond about how many replicas a load takes.

    prefill   c replicas with rho = rate E[S] / c <= RHO, and p90(S) + 2.3 W within the limit on TTFT (W: M/G/c wait);
              no line busier than LINE
    decode    the largest batch b whose step keeps 90% of the limit on TPOT and whose KV fits; rate o step(b) / (b RHO)
              replicas
    both      aggregated: a replica's time is prompts and steps, and every step may carry a chunk

The simulator corrects what they leave out. Roles do not depend on each other but for the sender's line, so the best of
each are combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from hackkv.errors import ConfigError
from measure.serve.shapes import Shape
from sim.cluster import cost_of, flow_of, host_bytes_of, line_of, pages_of
from sim.costs import CostModel
from sim.paper.model import erlang_wait
from sim.plan.objective import Limit, tightest
from sim.sizes import CodecSizes, sizes_of
from sim.spec import Codec, ReplicaPool, Spec
from sim.workload import shape_of

RHO: Final = 0.85
LINE: Final = 0.7
_SAMPLES: Final = 60
_TAIL: Final = math.log(10)
"""p90 of an exponential wait, in means."""
_TPOT_SHARE: Final = 0.9
_MOST: Final = 200_000
"""Replicas beyond which nothing is sought."""


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """What has to be served."""

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
        """Most tokens of one request."""
        return max(self.prompts) + max(self.outputs)

    def at(self, rate: float) -> ServiceTarget:
        """The same at another rate."""
        return replace(self, rate=rate)


def demand_of(spec: Spec, rate: float, limits: Sequence[Limit], shape: Shape | None = None) -> ServiceTarget:
    """A sample of the specification's load, or of another shape."""
    rng = np.random.default_rng(0)
    shape = shape or shape_of(spec.load)
    prompts, outputs = shape.prompt.draw(_SAMPLES, rng), shape.output.draw(_SAMPLES, rng)
    return ServiceTarget(tuple(prompts), tuple(outputs), rate, tuple(limits))


@dataclass(frozen=True, eq=False)
class Rig:
    """A kind of replica: a pool of one, with a codec."""

    spec: Spec
    pool: ReplicaPool
    codec: Codec

    @cached_property
    def sizes(self) -> CodecSizes:
        """Of the codec."""
        return sizes_of(self.codec, self.spec.shape.kv_shape)

    @cached_property
    def cost(self) -> CostModel:
        """Durations."""
        return cost_of(self.spec, self.pool, self.sizes)

    @cached_property
    def pages(self) -> int:
        """Raises `ConfigError` if weights leave no room."""
        return pages_of(self.spec, self.pool, self.sizes)

    @property
    def usd(self) -> float:
        """Of a replica, per hour."""
        return self.spec.usd_of(self.pool)

    def holds(self, tokens: int, *, by_host: bool) -> bool:
        """Whether a request of so many tokens fits."""
        footprint = self.sizes.footprint
        try:
            room = self.pages
        except ConfigError:
            return False
        if by_host:
            room = min(room, host_bytes_of(self.spec, self.pool) // footprint.wire_page_bytes)
        return footprint.pages(tokens) < room

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a prompt alone."""
        step = self.pool.chunk_tokens
        starts = range(0, tokens, step)
        return sum(self.cost.prefill([(start, min(step, tokens - start))]).seconds for start in starts)

    def __str__(self) -> str:
        shape = f"TP{self.pool.tp}" + (f" PP{self.pool.pp}" if self.pool.pp > 1 else "")
        return f"{self.pool.instance} {shape}"


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one rig."""

    rig: Rig
    replicas: float
    """Not rounded up."""
    bottleneck: str

    @property
    def count(self) -> int:
        """Rounded up."""
        return max(1, math.ceil(self.replicas - 1e-9))

    @property
    def usd(self) -> float:
        """Per hour, of whole replicas."""
        return self.count * self.rig.usd

    @property
    def share_usd(self) -> float:
        """Per hour, of fractions: for comparisons that steps of whole replicas would hide."""
        return self.replicas * self.rig.usd


@dataclass(frozen=True, slots=True)
class ClusterCandidate:
    """A cluster."""

    codec: Codec
    prefill: Part | None
    decode: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        """One or two."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def usd(self) -> float:
        """Per hour."""
        return sum(part.usd for part in self.parts)

    @property
    def share_usd(self) -> float:
        """Per hour, of fractions."""
        return sum(part.share_usd for part in self.parts)

    @property
    def kind(self) -> str:
        """For tables."""
        return f"{self.codec.label}, aggregated" if self.prefill is None else self.codec.label

    def with_counts(self, prefill: int, decode: int) -> ClusterCandidate:
        """The same rigs, in other numbers."""
        first = None if self.prefill is None else replace(self.prefill, replicas=float(prefill))
        return ClusterCandidate(self.codec, first, replace(self.decode, replicas=float(decode)))

    def fits(self, available: dict[str, int]) -> bool:
        """Whether so many instances can be had."""
        wanted: dict[str, float] = {}
        for part in self.parts:
            pool = part.rig.pool
            per = pool.gpus / part.rig.spec.instance_of(pool).gpus
            wanted[pool.instance] = wanted.get(pool.instance, 0.0) + part.count * per
        return all(math.ceil(count - 1e-9) <= available.get(name, _MOST) for name, count in wanted.items())


def rigs(spec: Spec, base: ReplicaPool, names: Sequence[str], codec: Codec) -> Iterator[Rig]:
    """Every instance and split over its GPUs that is allowed. A stage does not leave its instance."""
    for name in names or (base.instance,):
        for tp in spec.plan.tp:
            for pp in spec.plan.pp:
                pool = base.model_copy(update={"instance": name, "tp": tp, "pp": pp, "replicas": 1})
                if tp <= spec.instance_of(pool).gpus and spec.shape.layers % pp == 0:
                    yield Rig(spec, pool, codec)


def _service(rig: Rig, prompts: tuple[int, ...]) -> tuple[float, float, float]:
    """Mean, squared coefficient of variation and p90 of a prompt's seconds."""
    times = np.array([rig.prompt_s(tokens) for tokens in prompts])
    return float(times.mean()), float(times.var() / times.mean() ** 2), float(np.percentile(times, 90))


def prefill_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """How many replicas prompts take; None if none suffice."""
    if not rig.holds(max(demand.prompts), by_host=True):
        return None
    mean, cv2, p90 = _service(rig, demand.prompts)
    limit = tightest(demand.limits, "ttft")
    if p90 > limit:
        return None
    by_line = demand.rate * _mean_bytes(rig, demand) / (LINE * line_of(rig.spec, rig.pool))
    least = max(demand.rate * mean / RHO, by_line)

    def keeps(count: float) -> bool:
        whole = max(1, round(count))
        load = min(demand.rate * mean / count, 0.99)
        return p90 + _TAIL * (1 + cv2) / 2 * mean * erlang_wait(load, whole) <= limit

    count = least
    while not keeps(count) and count < _MOST:
        count = max(count * 1.05, count + (0.25 if count > 4 else 0.1))
    word = "line of the prefill replicas" if by_line >= demand.rate * mean / RHO else "prefill compute"
    return Part(rig, count, word) if count < _MOST else None


def _mean_bytes(rig: Rig, demand: ServiceTarget) -> float:
    sizes = rig.sizes
    return float(np.mean([sizes.footprint.wire_bytes(sizes.rows_held(tokens)) for tokens in demand.prompts]))


def best_batch(rig: Rig, demand: ServiceTarget, beside_s: float = 0.0) -> tuple[int, float, str]:
    """The largest batch that keeps the limit on TPOT, the seconds of its step, and what bounds it; 0 if none does."""
    footprint, rows = rig.sizes.footprint, [rig.sizes.rows_held(tokens) for tokens in demand.prompts]
    held = float(np.mean([footprint.sealed(n + o) for n, o in zip(rows, demand.outputs, strict=True)]))
    by_memory = int(rig.pages / max(1.0, held))
    most = max(0, min(rig.pool.max_batch, rig.pool.max_sequences, by_memory))
    limit = _TPOT_SHARE * tightest(demand.limits, "tpot")
    context = float(np.mean(rows)) + demand.output / 2

    def step_s(batch: int) -> float:
        return rig.cost.decode(batch).seconds(round(batch * context), 1) + beside_s

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    word = "memory's rate in decode" if low < most else "room for KV" if most == by_memory else "size of a batch"
    return low, step_s(low) if low else 0.0, word


def decode_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """How many replicas decoding takes; None if none suffice."""
    if not rig.holds(demand.longest, by_host=False):
        return None
    batch, step_s, word = best_batch(rig, demand)
    if not batch:
        return None
    by_steps = demand.rate * demand.output * step_s / (batch * RHO)
    by_line = demand.rate * _mean_bytes(rig, demand) / (LINE * line_of(rig.spec, rig.pool))
    return Part(rig, max(by_steps, by_line), "line of the decode replicas" if by_line > by_steps else word)


def both_part(rig: Rig, demand: ServiceTarget) -> Part | None:
    """How many replicas that do both a load takes; None if none suffice."""
    if not rig.holds(demand.longest, by_host=False):
        return None
    mean, _, p90 = _service(rig, demand.prompts)
    chunk_s = rig.cost.prefill([(round(demand.prompt / 2), min(rig.pool.chunk_tokens, round(demand.prompt)))]).seconds
    batch, step_s, word = best_batch(rig, demand, chunk_s)
    if not batch or p90 + step_s > tightest(demand.limits, "ttft"):
        return None
    plain_s = step_s - chunk_s
    return Part(rig, demand.rate * (mean + demand.output * plain_s / batch) / RHO, word)


def candidates(spec: Spec, demand: ServiceTarget, best: int = 3) -> list[ClusterCandidate]:
    """The best of every codec, cheapest first. Raises nothing: an empty list means that nothing suffices."""
    found: list[ClusterCandidate] = []
    for codec in spec.plan.codecs:
        base = spec.prefill or spec.decode
        can, of = spec.plan.available, spec.plan
        prefills = _cheapest((prefill_part(rig, demand) for rig in rigs(spec, base, of.prefill, codec)), best, can)
        decodes = _cheapest((decode_part(rig, demand) for rig in rigs(spec, spec.decode, of.decode, codec)), best, can)
        found += [ClusterCandidate(codec, first, second) for first in prefills for second in decodes]
        if spec.plan.aggregated:
            names = tuple(dict.fromkeys((*spec.plan.prefill, *spec.plan.decode)))
            chunk = spec.decode.model_copy(update={"chunk_tokens": min(512, spec.decode.chunk_tokens)})
            both = _cheapest((both_part(rig, demand) for rig in rigs(spec, chunk, names, codec)), best, can)
            found += [ClusterCandidate(codec, None, part) for part in both]
    found = [one for one in found if one.fits(spec.plan.available)]
    return sorted(found, key=lambda one: one.usd)


def _cheapest(parts: Iterator[Part | None], count: int, available: dict[str, int]) -> list[Part]:
    found = [
        part for part in parts if part is not None and ClusterCandidate(part.rig.codec, None, part).fits(available)
    ]
    return sorted(found, key=lambda part: (part.usd, part.share_usd))[:count]


def handoff_s(rig: Rig, tokens: int) -> float:
    """Seconds of a handoff on an idle line."""
    return rig.sizes.footprint.wire_bytes(rig.sizes.rows_held(tokens)) / flow_of(rig.spec, rig.pool)
