"""`python -m bench.ratio [--out docs]`: does the planner find the best ratio of prefill to decode replicas?

A number of equal machines is split between the roles in every possible way. For each split, the simulator finds by
bisection the rate that it serves within the objective (its goodput). The planner gets a budget for as many machines of
the same kind. Its split may lose 5% of the best split's goodput; the exit code is 1 if it loses more. `--out` writes
the table into plan.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.sections import write_section
from sim.network_spec import NetworkSpec
from sim.paper.tables import table
from sim.plan.objective import parse
from sim.plan.parts import ClusterCandidate, Part, Rig
from sim.plan.screen import ServiceTarget, demand_of
from sim.plan.search import Trial, fastest, most
from sim.spec import Choices, Codec, Load, ReplicaPool, Spec

MOST_LOST: Final = 0.05
INSTANCE: Final = "p4de.24xlarge"
_TP: Final = 1
_HALVINGS: Final = 8
"""Bisections of the range from 0 to twice the planner's rate: steps of less than 1%."""


@dataclass(frozen=True, slots=True)
class Question:
    """A load with its objective, and the codec and link of its KV."""

    load: Load
    slo: str
    codec: str = "rot-k4v4"
    link_gbit_s: float = 0.0


QUESTIONS: Final[Mapping[str, Question]] = {
    "chat": Question(Load(input_len=1_000, output_len=300), "ttft_p90=1s,tpot_p90=30ms"),
    "documents": Question(Load(shape="arxiv"), "ttft_p90=2s,tpot_p90=30ms"),
    "documents, FP16 over 5 Gbit/s": Question(Load(shape="arxiv"), "ttft_p90=2s,tpot_p90=30ms", "fp16", 5.0),
    "code": Question(Load(shape="humaneval"), "ttft_p90=500ms,tpot_p90=25ms"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """The goodput of every split, the planner's split, and the planner's rate."""

    grid: dict[tuple[int, int], float]
    """(prefill, decode) -> requests/s; 0 if the objective cannot be kept."""
    planned: tuple[int, int]
    rate: float
    """Requests per second of the split, as the planner says."""

    @property
    def best(self) -> tuple[int, int]:
        """The split of the highest goodput."""
        return max(self.grid, key=lambda split: self.grid[split])

    @property
    def lost(self) -> float:
        """Share of the best split's goodput that the planner's split loses, by the grid."""
        return 1 - self.grid[self.planned] / self.grid[self.best]


def spec_of(question: Question) -> Spec:
    """A specification with one kind of machine, so that only the ratio is left to choose."""
    pool = ReplicaPool(instance=INSTANCE, replicas=1, tp=_TP)
    choices = Choices(tp=(_TP,), pp=(1,), codecs=(Codec(name=question.codec),), aggregated=False)
    network = NetworkSpec(link_gbit_s=question.link_gbit_s)
    return Spec(model="mistral-7b", prefill=(pool,), decode=(pool,), network=network, load=question.load, plan=choices)


def answer(question: Question, replicas: int, seed: int) -> Found:
    """Plan, then try every split of `replicas` replicas."""
    spec = spec_of(question)
    demand = demand_of(spec, 1.0, parse(question.slo))
    budget = replicas * spec.usd_of(spec.decode[0])
    planned = most(spec, demand, budget * (1 + 1e-9), seed)[0]
    splits = [(count, replicas - count) for count in range(1, replicas)]
    grid = {split: goodput(spec, planned, demand, split, seed) for split in splits}
    return Found(grid, _split(planned.candidate), planned.rate)


def goodput(spec: Spec, planned: Trial, demand: ServiceTarget, split: tuple[int, int], seed: int) -> float:
    """Requests per second that a split serves within the objective."""
    codec = planned.candidate.codec
    sides = [
        Part(Rig(spec, pools[0], codec), float(count), "", float(count))
        for pools, count in zip((spec.prefill, spec.decode), split, strict=True)
    ]
    cluster = ClusterCandidate(codec, (sides[0],), (sides[1],))
    trial = fastest(spec, cluster, demand.at(planned.rate), seed, (0.0, 2.0), _HALVINGS)
    return 0.0 if trial is None else trial.rate


def _split(candidate: ClusterCandidate) -> tuple[int, int]:
    first, second = (sum(part.count for part in side) for side in (candidate.prefill, candidate.decode))
    return first, second


def lines(found: Mapping[str, Found], command: str) -> Iterator[str]:
    """The lines of the section of plan.md."""
    yield f"`{command}`"
    yield ""
    rows = [
        (
            name,
            f"{one.planned[0]} : {one.planned[1]}",
            f"{one.grid[one.planned]:.3g}",
            f"{one.best[0]} : {one.best[1]}",
            f"{one.grid[one.best]:.3g}",
            f"{one.lost:.1%}" + (" **off**" if one.lost > MOST_LOST else ""),
        )
        for name, one in found.items()
    ]
    yield from table(("load", "planned", "goodput, 1/s", "best of all splits", "goodput, 1/s", "lost"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer all questions; returns the exit code."""
    parser = argparse.ArgumentParser("python -m bench.ratio", description=__doc__)
    parser.add_argument("--replicas", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of plan.md")
    args = parser.parse_args(arguments)
    found = {name: answer(question, args.replicas, args.seed) for name, question in QUESTIONS.items()}
    text = "\n".join(lines(found, f"python -m bench.ratio --replicas {args.replicas} --seed {args.seed}"))
    print(text)
    if args.out:
        write_section(args.out, "ratio", text, None, "plan")
    return int(any(one.lost > MOST_LOST for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
