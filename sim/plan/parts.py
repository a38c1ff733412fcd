"""The parts of a plan: kinds of replicas, a count of each, and a cluster of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from hackkv.errors import ConfigError
from sim.capacity import cost_of, crossing_of, host_bytes_of, pages_of
from sim.catalogue import Instance
from sim.costs import CostModel
from sim.sizes import CodecSizes, sizes_of
from sim.spec import Codec, ReplicaPool, Spec
from sim.worth import prompt_s

MOST: Final = 200_000
"""The search gives up beyond this number of replicas."""


@dataclass(frozen=True, eq=False)
class Rig:
    """A kind of replica: a pool with one replica, and a codec."""

    spec: Spec
    pool: ReplicaPool
    codec: Codec

    @cached_property
    def sizes(self) -> CodecSizes:
        """Sizes of the codec on this model."""
        return sizes_of(self.codec, self.spec.shape.kv_shape)

    @cached_property
    def instance(self) -> Instance:
        """The machine of the replica."""
        return self.spec.instance_of(self.pool)

    @cached_property
    def line(self) -> float:
        """Bytes per second of the replica's line, or of its part of its rack's uplink if that is less."""
        return crossing_of(self.spec, self.pool)

    @cached_property
    def usd(self) -> float:
        """Dollars per hour of one replica."""
        return self.spec.usd_of(self.pool)

    @cached_property
    def cost(self) -> CostModel:
        """The cost model of the replica."""
        return cost_of(self.spec, self.pool, self.sizes)

    @cached_property
    def pages(self) -> int:
        """Pages of the replica. Raises `ConfigError` if weights leave no room."""
        return pages_of(self.spec, self.pool, self.sizes)

    def holds(self, tokens: int, *, by_host: bool) -> bool:
        """Whether a request of `tokens` tokens fits; with `by_host`, also into host memory."""
        footprint = self.sizes.footprint
        try:
            room = self.pages
        except ConfigError:
            return False
        if by_host:
            room = min(room, host_bytes_of(self.spec, self.pool) // footprint.wire_page_bytes)
        return footprint.pages(tokens) < room

    def prompt_s(self, tokens: int) -> float:
        """Seconds to compute a prompt alone."""
        return prompt_s(self.cost, tokens, self.pool.chunk_tokens)

    def __str__(self) -> str:
        shape = f"TP{self.pool.tp}" + (f" PP{self.pool.pp}" if self.pool.pp > 1 else "")
        return f"{self.pool.instance} {shape}"


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one rig."""

    rig: Rig
    replicas: float
    """The number of replicas, not rounded up."""
    bottleneck: str
    alone: float
    """Replicas that the role takes, by formulas, if all of them are of this rig. One replica serves 1 / `alone` of the
    load for which the part was made."""

    @property
    def count(self) -> int:
        """The number of replicas, rounded up."""
        return max(1, math.ceil(self.replicas - 1e-9))

    @property
    def usd(self) -> float:
        """Dollars per hour of whole replicas."""
        return self.count * self.rig.usd

    @property
    def share_usd(self) -> float:
        """Dollars per hour of fractional replicas, for comparisons that rounding up would hide."""
        return self.replicas * self.rig.usd

    @property
    def role_usd(self) -> float:
        """Dollars per hour if the role has no other kind."""
        return self.alone * self.rig.usd

    def __str__(self) -> str:
        return f"{self.count} x {self.rig}"


@dataclass(frozen=True, slots=True)
class ClusterCandidate:
    """A cluster. A role may have several kinds of replicas."""

    codec: Codec
    prefill: tuple[Part, ...]
    """Empty if replicas of `decode` do both."""
    decode: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of both roles, prefill first."""
        return self.prefill + self.decode

    @property
    def usd(self) -> float:
        """Dollars per hour of whole replicas."""
        return sum(part.usd for part in self.parts)

    @property
    def share_usd(self) -> float:
        """Dollars per hour of fractional replicas."""
        return sum(part.share_usd for part in self.parts)

    @property
    def is_mixed(self) -> bool:
        """Whether a role has several kinds of replicas."""
        return len(self.prefill) > 1 or len(self.decode) > 1

    @property
    def kind(self) -> str:
        """The codec, and whether replicas do both."""
        return self.codec.label if self.prefill else f"{self.codec.label}, aggregated"

    @property
    def label(self) -> str:
        """The kind, and whether a role is mixed; for tables."""
        return f"{self.kind}, mixed" if self.is_mixed else self.kind

    def changed(self, index: int, by: int) -> ClusterCandidate | None:
        """The cluster with `by` more replicas of one part; None if the role would have none left."""
        counts = [part.count for part in self.parts]
        counts[index] += by
        return self._with_counts(counts)

    def moved(self, index: int, place: int, by: tuple[int, int]) -> ClusterCandidate | None:
        """The cluster with `by[0]` fewer replicas of the part at `index` and `by[1]` more of the part at `place`; None
        if a role would have none left."""
        counts = [part.count for part in self.parts]
        counts[index] -= by[0]
        counts[place] += by[1]
        return self._with_counts(counts)

    def _with_counts(self, counts: Sequence[int]) -> ClusterCandidate | None:
        """The same rigs with other counts, in the order of `parts`; parts with a count of 0 are left out."""
        if min(counts) < 0:
            return None
        cut, parts = len(self.prefill), zip(self.parts, counts, strict=True)
        counted = [replace(part, replicas=float(count)) if count else None for part, count in parts]
        first, second = (tuple(filter(None, some)) for some in (counted[:cut], counted[cut:]))
        return ClusterCandidate(self.codec, first, second) if second and bool(first) is bool(self.prefill) else None

    def joined(self, part: Part, *, prefill: bool) -> ClusterCandidate:
        """The cluster with one more replica, of a kind that may be new to the role."""
        one = replace(part, replicas=1.0)
        side = self.prefill if prefill else self.decode
        more = tuple(replace(own, replicas=own.count + 1.0) if own.rig is part.rig else own for own in side)
        if not any(own.rig is part.rig for own in side):
            more = (*side, one)
        return replace(self, prefill=more) if prefill else replace(self, decode=more)

    @property
    def gpus(self) -> dict[str, int]:
        """Instance -> GPUs that the cluster uses."""
        used: dict[str, int] = {}
        for part in self.parts:
            pool = part.rig.pool
            used[pool.instance] = used.get(pool.instance, 0) + part.count * pool.gpus
        return used

    def fits(self, available: dict[str, int]) -> bool:
        """Whether the cluster needs no more instances than are available."""
        of_one = {part.rig.pool.instance: part.rig.instance.gpus for part in self.parts}
        return all(gpus <= available.get(name, MOST) * of_one[name] for name, gpus in self.gpus.items())
