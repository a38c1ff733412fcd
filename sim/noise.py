"""Durations that vary: a lognormal factor of median 1 on each, from a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sim.costs import CostModel, PassCost, StepCost


@dataclass(frozen=True, slots=True)
class _NoisyStep:
    """Steps of one run share a factor."""

    cost: StepCost
    factor: float

    def seconds(self, context: int, steps: int) -> float:
        """See `StepCost`."""
        return self.factor * self.cost.seconds(context, steps)

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """See `StepCost`."""
        attend_s, approximation_s = self.cost.attend_s(context, steps)
        return self.factor * attend_s, self.factor * approximation_s


class Noisy:
    """A cost model with noise. Equal seeds give equal noise."""

    def __init__(self, cost: CostModel, sigma: float, seed: str) -> None:
        self._cost, self._sigma, self._random = cost, sigma, random.Random(seed)

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """See `CostModel`."""
        cost, factor = self._cost.prefill(chunks), self._factor()
        return PassCost(cost.seconds * factor, cost.quantize_s * factor)

    def decode(self, batch: int) -> StepCost:
        """See `CostModel`."""
        return _NoisyStep(self._cost.decode(batch), self._factor())

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `CostModel`."""
        return self._cost.replay(chunks) * self._factor()

    def swap(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return self._cost.swap(num_bytes) * self._factor()

    def _factor(self) -> float:
        return self._random.lognormvariate(0.0, self._sigma)
