"""Agreement of a simulation with measurements: mean and 90th percentile of every stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

MEAN_WITHIN, P90_WITHIN = 0.15, 0.25
NEGLIGIBLE: Final = 0.02
"""A difference below this share of the JCT is ignored: stages of some milliseconds vary with the machine."""
JCT: Final = "jct"

Runs = Sequence[Mapping[str, Sequence[float]]]
"""Repeats of one load. Each is stage (or `JCT`) -> seconds of every request."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One statistic of one stage, in seconds."""

    stage: str
    statistic: str
    live: float
    simulated: float
    within: float
    """The largest allowed relative error."""
    of_jct: float
    """The same statistic of the live JCT."""

    @property
    def difference(self) -> float:
        """Simulated minus live, in seconds."""
        return self.simulated - self.live

    @property
    def error(self) -> float:
        """The difference as a share of the live value."""
        return self.difference / self.live if self.live else float(self.simulated > 0)

    @property
    def agrees(self) -> bool:
        """Whether the error is small enough, or the difference negligible."""
        return abs(self.error) <= self.within or abs(self.difference) <= NEGLIGIBLE * self.of_jct


def compare(live: Runs, simulated: Mapping[str, Sequence[float]]) -> list[Compared]:
    """Statistics of every stage of `simulated`: means, then 90th percentiles. The median of the live repeats counts."""
    return [*_statistic("mean", live, simulated, MEAN_WITHIN), *_statistic("p90", live, simulated, P90_WITHIN)]


def _statistic(name: str, live: Runs, simulated: Mapping[str, Sequence[float]], within: float) -> Iterator[Compared]:
    of_jct = _median(name, live, JCT)
    for stage, seconds in simulated.items():
        yield Compared(stage, name, _median(name, live, stage), _of(name, seconds), within, of_jct)


def _median(name: str, live: Runs, stage: str) -> float:
    return float(np.median([_of(name, run[stage]) for run in live]))


def _of(name: str, seconds: Sequence[float]) -> float:
    return float(np.mean(seconds) if name == "mean" else np.percentile(seconds, 90))


def spread(live: Runs) -> float:
    """The range of the repeats' mean JCTs, as a share of their median. No simulation can be more exact than that."""
    means = [_of("mean", run[JCT]) for run in live]
    return (max(means) - min(means)) / float(np.median(means))
