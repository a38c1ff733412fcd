"""Noise: durations that are each multiplied by a random factor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sim.costs import CostModel, PassCost, StepCost


@dataclass(frozen=True, slots=True)
class _ScaledStep:
    """Steps of one run, which share a factor."""

    cost: StepCost
    factor: float

    def seconds(self, context: int, steps: int) -> float:
        """See `StepCost`."""
        return self.factor * self.cost.seconds(context, steps)

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """See `StepCost`."""
        attend_s, approximation_s = self.cost.attend_s(context, steps)
        return self.factor * attend_s, self.factor * approximation_s


class Scaled:
    """A cost model whose durations are multiplied by a factor, drawn from `factor` when the work begins."""

    def __init__(self, cost: CostModel, factor: Callable[[], float]) -> None:
        self._cost, self._factor = cost, factor

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """See `CostModel`."""
        cost, factor = self._cost.prefill(chunks), self._factor()
        return PassCost(cost.seconds * factor, cost.quantize_s * factor)

    def decode(self, batch: int) -> StepCost:
        """See `CostModel`."""
        return _ScaledStep(self._cost.decode(batch), self._factor())

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `CostModel`."""
        return self._cost.replay(chunks) * self._factor()

    def swap(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return self._cost.swap(num_bytes) * self._factor()


def noisy(cost: CostModel, sigma: float, seed: str) -> Scaled:
    """A cost model with lognormal factors of median 1. Equal seeds give equal noise."""
    return Scaled(cost, partial(random.Random(seed).lognormvariate, 0.0, sigma))
