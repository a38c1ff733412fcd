"""The cluster of a record in the simulator, with the time around passes and steps.

Two numbers cannot be read off the measurements. So the same requests are simulated, and the numbers are those with
which the simulated requests take as long as the live ones:

- The time that each further sequence adds to a step. The prompts of a batch that was sent at once are computed in
  turns, so the first steps have fewer sequences than the last ones.
- The number of cores that are lost when a pass and a step run side by side. If no cache holds the weights, both read
  them from the memory that they share, so each takes longer beside the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

from bench.gate.agreement import JCT
from bench.gate.around import Around, host_of, spec_of
from bench.gate.recording import Recording, Size
from hackkv.timing import Stage
from sim.cluster import Cluster
from sim.jobs import Arrival
from sim.sizes import sizes_of
from sim.spec import Codec, Spec

HALVINGS: Final = 8
MOST: Final = 0.25
"""The largest `Around.sequence_s`, as a share of a step of one sequence."""


def simulate(spec: Spec, sizes: Sequence[Size]) -> dict[str, list[float]]:
    """Stage (or `JCT`) -> seconds of every request in the simulator."""
    rows = Cluster(spec).run([Arrival(*size) for size in sizes]).rows
    return {JCT: list(rows["e2el_s"]), **{str(stage): list(rows[f"{stage}_s"]) for stage in Stage}}


def spec_of_record(of: Recording, profile: Path) -> Spec:
    """The specification by which a record is judged. Writes the file `profile`, to which the specification refers."""
    around, host = Around.of(of.alone, of.idle), None
    if not of.naps:
        sizes = sizes_of(Codec(name=of.codec), of.shape.kv_shape)
        host = host_of(of.idle, of.alone.decode.rows, of.cores, sizes.footprint)

    def spec(sequence_s: float, lost_cores: float) -> Spec:
        at = around.model_copy(update={"sequence_s": sequence_s})
        profile.write_text(at.profile(of.alone).model_dump_json(), encoding="utf-8")
        left = host and host.model_copy(update={"cores": host.cores - lost_cores})
        return spec_of(of.shape, of.codec, of.pages, profile, at, left)

    def takes_longer(sequence_s: float) -> bool:
        made = spec(sequence_s, lost_cores)
        ratios = [median(simulate(made, sizes)[Stage.DECODE]) / live for sizes, live in batches]
        return fmean(map(math.log, ratios)) > 0

    def steps_longer(lost_cores: float) -> bool:
        assert beside is not None
        answers = [index for index, (_, _, tokens) in enumerate(beside.sizes) if tokens > 1]
        sizes = beside.sizes[: answers[1] if len(answers) > 1 else None]
        live = median(beside.stages[Stage.DECODE][index] for index in answers)
        return simulate(spec(0.0, lost_cores), sizes)[Stage.DECODE][0] > live

    beside = of.idle.beside
    lost_cores = _most(host.cores - 1, steps_longer) if host and beside else 0.0

    batches = [
        (phase.sizes[: round(batch)], median(phase.stages[Stage.DECODE]))
        for batch, phase in zip(of.alone.decode.rows, of.idle.steps, strict=True)
        if batch > 1
    ]
    step_s = around.step * of.alone.decode.seconds[0][0]
    return spec(_most(MOST * step_s, takes_longer) if batches else 0.0, lost_cores)


def _most(limit: float, longer: Callable[[float], bool]) -> float:
    """The largest value up to `limit` with which nothing takes longer than it did live; 0 if it does even with 0."""
    low, high = 0.0, limit
    for _ in range(0 if longer(0.0) else HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if longer(middle) else (middle, high)
    return low
