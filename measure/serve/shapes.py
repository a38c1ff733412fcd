"""Lengths of prompts and outputs: those of the HACK paper's data sets (Table 4), or fixed ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

_STEEPEST = 500.0
_FLAT = 1e-6
_HALVINGS = 80


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of lengths in tokens, given by its mean, minimum and maximum."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Spread:
        """The same distribution with all lengths times `factor`."""
        return Spread(self.mean * factor, self.low * factor, self.high * factor)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` lengths of at least 1 token.

        Table 4 gives only three numbers, so the lengths follow the distribution that assumes nothing else: that of
        greatest entropy with this mean on this interval, which is an exponential cut off at both ends.
        """
        if self.low == self.high:
            return [max(1, round(self.mean))] * count
        width = self.high - self.low
        steepness = _steepness((self.mean - self.low) / width)
        uniform = rng.random(count)
        flat = abs(steepness) < _FLAT
        share = uniform if flat else np.log1p(uniform * math.expm1(steepness)) / steepness
        return [max(1, round(self.low + width * float(x))) for x in share]


def _steepness(mean: float) -> float:
    """k of the density proportional to exp(k x) on [0, 1] whose mean is `mean`, by bisection."""
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle) < mean else (low, middle)
    return low


def _mean(k: float) -> float:
    """Mean of the density proportional to exp(k x) on [0, 1]."""
    if abs(k) < _FLAT:
        return 0.5
    return 1 / -math.expm1(-k) - 1 / k


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of prompts and of outputs."""

    prompt: Spread
    output: Spread

    def scaled(self, factor: float) -> Shape:
        """Both distributions with all lengths times `factor`."""
        return Shape(self.prompt.scaled(factor), self.output.scaled(factor))


SHAPES: Final[dict[str, Shape]] = {
    "imdb": Shape(Spread(315, 106, 821), Spread(37, 16, 87)),
    "arxiv": Shape(Spread(6_300, 1_600, 14_100), Spread(243, 29, 464)),
    "cocktail": Shape(Spread(16_200, 9_400, 28_800), Spread(159, 44, 246)),
    "humaneval": Shape(Spread(204, 75, 697), Spread(139, 11, 552)),
}
"""HACK, Table 4: tokens of prompts and outputs, as average, minimum and maximum."""


def fixed(prompt_tokens: int, output_tokens: int) -> Shape:
    """All prompts and all outputs of one length."""
    return Shape(
        Spread(prompt_tokens, prompt_tokens, prompt_tokens), Spread(output_tokens, output_tokens, output_tokens)
    )
