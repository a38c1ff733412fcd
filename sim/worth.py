"""The goodput of a kind of replica, by formulas: what an autoscaler and a plan compare kinds by.

A kind's cost per goodput is its price over the requests per second that one replica serves. It says which kind of a
role starts first and which stops last. It is the rule by which the planner adds and removes kinds (`sim.plan.search`):
whoever needs one more unit of goodput pays least for it with the kind that costs least per unit, however fast a single
replica is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sim.capacity import pages_of
from sim.costs import CostModel
from sim.jobs import Arrival
from sim.sizes import CodecSizes
from sim.spec import ReplicaPool, Spec

_SHORTEST_S: Final = 1e-9
"""Work that takes no time counts as this many seconds, so that a goodput is finite."""


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """A request of mean length."""

    prompt: int
    output: int

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> TypicalRequest:
        """The mean of all arrivals; one token each without arrivals."""
        count = max(1, len(arrivals))
        prompts = sum(each.prompt_tokens for each in arrivals)
        outputs = sum(each.output_tokens for each in arrivals)
        return cls(max(1, round(prompts / count)), max(1, round(outputs / count)))


def prompt_s(cost: CostModel, tokens: int, chunk_tokens: int) -> float:
    """Seconds to compute a prompt alone."""
    starts = range(0, tokens, chunk_tokens)
    return sum(cost.prefill([(start, min(chunk_tokens, tokens - start))]).seconds for start in starts)


def largest_batch(step_s: Callable[[int], float], most: int, limit_s: float) -> int:
    """The largest batch, up to `most`, whose step takes no longer than `limit_s`; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def goodput(
    spec: Spec, role: str, pool: ReplicaPool, sizes: CodecSizes, cost: CostModel, request: TypicalRequest
) -> float:
    """Requests per second that a busy replica of a role's pool serves.

    A prefill replica computes prompts one after another. A decode replica runs the largest batch that its pages hold
    and that keeps the specification's limit on TPOT, or one request if no batch does. A replica that does both spends
    time on both.
    """
    prompts_s = prompt_s(cost, request.prompt, pool.chunk_tokens)
    if role == "prefill":
        return 1 / max(_SHORTEST_S, prompts_s)
    rows = sizes.rows_held(request.prompt)
    held = max(1, sizes.footprint.pages(rows + request.output))
    most = min(pool.max_batch, pool.max_sequences, pages_of(spec, pool, sizes) // held)
    context = rows + request.output // 2

    def step_s(batch: int) -> float:
        return cost.decode(batch).seconds(batch * context, 1)

    batch = max(1, largest_batch(step_s, most, math.inf if spec.slo.tpot is None else spec.slo.tpot / 1e3))
    seconds = request.output * step_s(batch) / batch + (0.0 if spec.prefill else prompts_s)
    return 1 / max(_SHORTEST_S, seconds)
