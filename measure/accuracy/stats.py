"""Confidence intervals: Wilson's for shares of yes and no, the bootstrap for everything else.

Changes against exact KV are paired. Both rows answered the same samples, so the bootstrap draws samples rather than
scores, and the difficulty of a sample, which both rows share, cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DRAWS = 2000
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A value with its 95 % confidence interval, and the method of the interval."""

    value: float
    low: float
    high: float
    method: str

    def minus(self, amount: float) -> ConfidenceInterval:
        """The interval less `amount`."""
        return ConfidenceInterval(self.value - amount, self.low - amount, self.high - amount, self.method)


def wilson(mean: float, count: int) -> ConfidenceInterval:
    """Wilson's score interval of a share `mean` of `count` trials. It has a width even at 0 and 1."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count * count))
    return ConfidenceInterval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)), "wilson")


def share(scores: Floats) -> ConfidenceInterval:
    """Mean of scores in 0..1.

    If all scores are 0 or 1, or all are equal, the interval is Wilson's, since the bootstrap of equal scores has no
    width. For equal scores that are shares within a sample, Wilson's interval is too wide rather than too narrow.
    """
    mean = float(scores.mean())
    if np.isin(scores, (0.0, 1.0)).all() or np.ptp(scores) == 0:
        return wilson(mean, len(scores))
    return _interval(mean, _draws(len(scores)), scores)


def perplexity(nlls: Floats) -> ConfidenceInterval:
    """exp of the mean negative log-likelihood per token; samples are of equal length."""
    log = _interval(float(nlls.mean()), _draws(len(nlls)), nlls)
    return ConfidenceInterval(math.exp(log.value), math.exp(log.low), math.exp(log.high), log.method)


def mean(values: Floats) -> ConfidenceInterval:
    """Mean of values of any size."""
    return _interval(float(values.mean()), _draws(len(values)), values)


def ratio_of_sums(values: Floats, exact: Floats) -> ConfidenceInterval:
    """sum(values) / sum(exact), paired; NaN or infinite if `exact` sums to 0."""
    draws, level = _draws(len(values)), _level(len(values))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values[draws].sum(1) / exact[draws].sum(1)
        low, high = np.quantile(ratios, (level, 1 - level))
        return ConfidenceInterval(float(values.sum() / exact.sum()), float(low), float(high), "bootstrap")


def change(scores: Floats, exact: Floats) -> ConfidenceInterval:
    """Paired difference of the means, scores - exact."""
    return _interval(float((scores - exact).mean()), _draws(len(scores)), scores - exact)


def ratio(nlls: Floats, exact: Floats) -> ConfidenceInterval:
    """Paired ratio of the perplexities, minus 1: 0.02 is 2 % worse."""
    log = change(nlls, exact)
    return ConfidenceInterval(math.expm1(log.value), math.expm1(log.low), math.expm1(log.high), log.method)


def _draws(count: int) -> npt.NDArray[np.int64]:
    """Resamples of `count` samples, the same on every call."""
    return np.random.default_rng(0).integers(0, count, (DRAWS, count))


def _interval(value: float, draws: npt.NDArray[np.int64], scores: Floats) -> ConfidenceInterval:
    level = _level(len(scores))
    low, high = np.quantile(scores[draws].mean(1), (level, 1 - level))
    return ConfidenceInterval(value, float(low), float(high), "bootstrap")


def _level(count: int) -> float:
    """The quantile to read at the lower end: Hesterberg's expanded percentile interval.

    For few samples plain percentiles are too narrow by two factors: the standard deviation divides by n, not n - 1, and
    the normal distribution stands in for Student's t. Here t follows from the Cornish-Fisher expansion.
    """
    if count < 2:
        return 0.025
    free = count - 1
    t = Z95 + (Z95**3 + Z95) / (4 * free) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * free**2)
    return 0.5 * math.erfc(t * math.sqrt(count / free) / math.sqrt(2))
