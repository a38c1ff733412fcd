"""Limits that the cluster must keep: `ttft_p90=2s,tpot_p90=50ms`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hackkv.errors import ConfigError
from sim.results import RequestTable

METRICS = ("ttft", "tpot", "e2el")
_TERM = re.compile(r"(?P<metric>[a-z0-9]+)_p(?P<percent>\d{1,2})=(?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)")


@dataclass(frozen=True, slots=True)
class Limit:
    """A percentile of a metric that must not be exceeded."""

    metric: str
    percent: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percent} <= {self.seconds:g} s"

    def found(self, rows: RequestTable) -> float:
        """The percentile in a simulation, in seconds; infinite if a request failed."""
        if not rows.ok.all():
            return float("inf")
        values = rows[f"{self.metric}_s"]
        values = values[len(values) // 10 :]
        values = values[~np.isnan(values)]
        return float(np.percentile(values, self.percent)) if len(values) else 0.0


def parse(text: str) -> tuple[Limit, ...]:
    """Read `--slo`. Raises `ConfigError` naming the term at fault."""
    limits = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = _TERM.fullmatch(term)
        if match is None or match["metric"] not in METRICS or not int(match["percent"]):
            raise ConfigError(f"--slo: {term!r}: expected METRIC_pNN=VALUE[ms|s] with one of {', '.join(METRICS)}")
        seconds = float(match["value"]) / (1e3 if match["unit"] == "ms" else 1)
        if not seconds:
            raise ConfigError(f"--slo: {term!r}: the limit is 0")
        limits.append(Limit(match["metric"], int(match["percent"]), seconds))
    if not limits:
        raise ConfigError("--slo: no limit is given")
    return tuple(limits)


def tightest(limits: Sequence[Limit], metric: str) -> float:
    """The smallest limit on a metric, in seconds; infinite if there is none."""
    return min((limit.seconds for limit in limits if limit.metric == metric), default=float("inf"))
