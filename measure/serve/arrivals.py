"""When requests arrive: a renewal process whose gaps are gamma distributed, as in `vllm bench serve`."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent; the first at 0.

    `rate` is requests per second, inf for all at once. `burstiness` is the shape of the gamma distribution: 1 is a
    Poisson process, less is burstier (the coefficient of variation is 1/sqrt(burstiness)), more is steadier. Unlike
    vLLM's, the times are not stretched to end at count/rate: a short run of a Poisson process has a random length.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    gaps[:1] = 0
    return [float(at_s) for at_s in np.cumsum(gaps)]
