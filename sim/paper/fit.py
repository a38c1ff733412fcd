"""Parameters that bring the formulas nearest to the paper: `python -m sim.paper fit` (needs scipy)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from hackkv.config import Frozen, load
from sim.paper.model import Parameters, arrival_rate, reductions, setup_of, transfer_share
from sim.paper.numbers import FITTED, numbers
from sim.results import Floats

FILE: Final = Path(__file__).with_name("parameters.yaml")
BOUNDS: Final = {
    "compute": (0.2, 0.6),
    "attention": (1.0, 2.9),
    "network": (0.03, 1.0),
    "setup_s": (0.0, 0.15),
    "memory_us": (0.0, 15.0),
    "product_us": (0.0, 15.0),
    "dequantize_ms": (0.0, 10.0),
    "dequantize_us": (0.0, 15.0),
    "kvquant": (1.0, 2.0),
    "rho": (0.3, 0.92),
}
"""Ranges that are plausible for an engine."""
_SHARE_WEIGHT: Final = 0.2
"""Weight of the mean error in transfer shares, relative to that in reductions."""
_RATE: Final = 0.18
"""Requests per second: the largest that the paper names (Fig. 1d)."""
_RATE_WEIGHT: Final = 5.0
"""Points of cost per relative error of the load. Rate and shares cannot both be met."""
_SEED: Final = 1


class Fits(Frozen):
    """Two fits. `all_cases` only describes the paper; `held_out` is fitted to `FITTED` and predicts the other cases."""

    all_cases: Parameters
    held_out: Parameters


def fits() -> Fits:
    """The fits in the file."""
    return load(Fits, FILE)


def errors(p: Parameters, cases: Collection[str]) -> Floats:
    """Model less paper, in points: [cases, 3]."""
    paper = numbers().cases
    found = [np.subtract(reductions(setup_of(paper[name]), p), paper[name].reductions) for name in cases]
    return np.asarray(found, dtype=np.float64)


def share_errors(p: Parameters, cases: Collection[str]) -> Floats:
    """Model less paper in the transfer's share of JCT, in points, for the cases that stand for a GPU."""
    paper = numbers()
    gpus = {"Cocktail": "A10G", "T4": "T4", "L4": "L4", "V100": "V100", "A100": "A100"}
    found = [
        transfer_share(setup_of(paper.cases[name]), p) - paper.transfer_share[gpu]
        for name, gpu in gpus.items()
        if name in cases
    ]
    return np.array(found)


def fit(cases: Collection[str], *, by_rate: bool) -> Parameters:
    """The parameters within `BOUNDS` of least mean absolute error, by differential evolution with a fixed seed.

    Reductions alone do not determine the load. The fit takes it from the paper's rate (`by_rate`) or from the paper's
    transfer shares.
    """
    from scipy.optimize import differential_evolution  # noqa: PLC0415 (only who fits needs it)

    def of(values: Floats) -> Parameters:
        return Parameters(**{name: float(value) for name, value in zip(BOUNDS, values, strict=True)})

    cocktail = setup_of(numbers().cases["Cocktail"])

    def cost(values: Floats) -> float:
        p = of(values)
        off = float(np.abs(errors(p, cases)).mean())
        if by_rate:
            return off + _RATE_WEIGHT * abs(arrival_rate(cocktail, p) / _RATE - 1)
        return off + _SHARE_WEIGHT * float(np.abs(share_errors(p, cases)).mean())

    best = differential_evolution(
        cost, list(BOUNDS.values()), seed=_SEED, maxiter=250, popsize=8, tol=1e-6, polish=False
    )
    return of(best.x)


def write_fits() -> Fits:
    """Fit both and write them to the file."""
    found = Fits(all_cases=fit(tuple(numbers().cases), by_rate=False), held_out=fit(FITTED, by_rate=True))
    data = {
        name: {key: float(f"{value:.4g}") for key, value in one.items()} for name, one in found.model_dump().items()
    }
    FILE.write_text(
        "# Written by `python -m sim.paper fit`; sim/paper/model.py says what they mean.\n" + yaml.safe_dump(data),
        encoding="utf-8",
    )
    return fits()
