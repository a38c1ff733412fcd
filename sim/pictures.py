"""Pictures of a simulation. Needs matplotlib (`pip install 'hackkv[eval]'`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from measure.serve.plot import DPI, draw, read_run
from sim.results import Floats, RequestTable


def draw_run(rows: RequestTable, result: Path, folder: Path) -> list[Path]:
    """`stages.png` (mean JCT by stage) and `times.png` (distribution of TTFT, TPOT and JCT; waits over time)."""
    stages, times = folder / "stages.png", folder / "times.png"
    draw([read_run(result)], stages)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    ok = rows.ok
    for name, colour in (("ttft", "#3b6fb6"), ("tpot", "#3f8f5b"), ("e2el", "#5a5a5a")):
        values = rows[f"{name}_s"][ok]
        _distribution(left, values[~np.isnan(values)], name, colour)
    left.set_xscale("log")
    left.set_xlabel("seconds")
    left.set_ylabel("share of requests")
    left.legend(frameon=False)
    waits = rows["prefill_queue_s"] + rows["swap_wait_s"] + rows["decode_queue_s"] + rows["router_queue_s"]
    right.plot(rows["at_s"][ok], waits[ok], ".", markersize=2, color="#8f8f8f")
    right.set_xlabel("arrival, s")
    right.set_ylabel("waited, s")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(times, dpi=DPI)
    return [stages, times]


def _distribution(axes: Axes, values: Floats, name: str, colour: str) -> None:
    if len(values):
        axes.plot(np.sort(values), np.linspace(0, 1, len(values)), label=name, color=colour)
