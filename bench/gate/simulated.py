"""The cluster of a record in the simulator, with all that surrounds passes and steps.

What a step takes for each sequence more cannot be read off a batch that was sent at once: its prompts are computed in
turns, so its first steps have fewer sequences than its last ones. So the same batches are simulated, and the seconds
are those with which they take as long as they took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
"""Seconds of `Around.sequence_s` at most, as a share of a step of one sequence."""


def simulate(spec: Spec, sizes: Sequence[Size]) -> dict[str, list[float]]:
    """Stage, and `JCT`, -> seconds of the same requests in the simulator."""
    rows = Cluster(spec).run([Arrival(*size) for size in sizes]).rows
    return {JCT: list(rows["e2el_s"]), **{str(stage): list(rows[f"{stage}_s"]) for stage in Stage}}


def spec_of_record(of: Recording, profile: Path) -> Spec:
    """The specification that a record is judged by. `profile` is written and belongs to it."""
    around, host = Around.of(of.alone, of.idle), None
    if not of.naps:
        sizes = sizes_of(Codec(name=of.codec), of.shape.kv_shape)
        host = host_of(of.idle, of.alone.decode.rows, of.cores, sizes.footprint)

    def spec(sequence_s: float) -> Spec:
        at = around.model_copy(update={"sequence_s": sequence_s})
        profile.write_text(at.profile(of.alone).model_dump_json(), encoding="utf-8")
        return spec_of(of.shape, of.codec, of.pages, profile, at, host)

    def too_long(sequence_s: float) -> bool:
        made = spec(sequence_s)
        ratios = [median(simulate(made, sizes)[Stage.DECODE]) / live for sizes, live in batches]
        return fmean(map(math.log, ratios)) > 0

    batches = [
        (phase.sizes[: round(batch)], median(phase.stages[Stage.DECODE]))
        for batch, phase in zip(of.alone.decode.rows, of.idle.steps, strict=True)
        if batch > 1
    ]
    step_s = around.step * of.alone.decode.seconds[0][0]
    low, high = 0.0, MOST * step_s
    for _ in range(HALVINGS if batches and not too_long(0.0) else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if too_long(middle) else (middle, high)
    return spec(low)
