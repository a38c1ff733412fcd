"""Small clusters and cost models for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker
from hackkv.timing import Stage
from sim.cluster import Cluster, Options, SimulationOutcome
from sim.costs import LinearStep, PassCost
from sim.jobs import Arrival
from sim.results import Floats, RequestTable
from sim.spec import Codec, Load, ReplicaPool, Spec
from sim.weightless import weightless_worker
from tests.pair import PI

SMALL = {"model": "mistral-7b", "codec": Codec(name="rot-k4v4")}


def small(prefills: int = 2, decodes: int = 2, **fields: Any) -> Spec:
    """A small cluster. `fields` replace fields of its specification."""
    prefill = ReplicaPool(instance="g5.12xlarge", replicas=prefills, tp=4, chunk_tokens=2048)
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=decodes, tp=1)
    load = Load(shape="arxiv", rate=2.0, requests=200)
    return Spec.model_validate({**SMALL, "prefill": prefill, "decode": decode, "load": load, **fields})


def tight(pages: int, **fields: Any) -> Spec:
    """A cluster whose decode replicas are short of pages, so that they swap."""
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=2, pages=pages, max_batch=16, host_gib=64)
    load = Load(input_len=256, output_len=200, rate=40.0, requests=150)
    return small(decode=decode, load=load, **fields)


def weightless(folder: Path, codec: str) -> Worker:
    """Mistral-7B on an A100, without weights: it sleeps instead of computing. Its tokenizer is that of a tiny
    checkpoint, which is written to `folder`."""
    pool = ReplicaPool(instance="p4de.24xlarge", replicas=1)
    spec = Spec(
        model="mistral-7b", prefill=(pool,), decode=(pool,), codec=Codec(name=codec, settings={"page_tokens": PI})
    )
    return weightless_worker(spec, pool, write_tiny(folder, Tiny(max_context=1024)))


@dataclass(frozen=True)
class Drawn:
    """Costs in which each step takes the seconds that `draw` gives, and so does each pass if `prefills`."""

    draw: Callable[[], float]
    prefills: bool = False
    """Whether passes take time at all."""

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """One draw, if passes take time."""
        return PassCost(self.draw() if self.prefills else 0.0)

    def decode(self, batch: int) -> LinearStep:
        """One draw."""
        return LinearStep(batch, self.draw(), 0.0)

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Nothing."""
        return 0.0

    def swap(self, num_bytes: int) -> float:
        """Nothing."""
        return 0.0


def stages(rows: RequestTable) -> Floats:
    """[requests]: the sum of all stages."""
    return np.asarray(np.sum([rows[f"{stage}_s"] for stage in Stage], axis=0))


def run(spec: Spec, arrivals: Sequence[Arrival], **options: Any) -> SimulationOutcome:
    """The outcome of a specification."""
    return Cluster(spec, Options(**options)).run(arrivals)
