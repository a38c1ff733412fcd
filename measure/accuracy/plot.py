"""Accuracy against bytes per token: one panel per task, one line per family of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from measure.accuracy.cells import VariantRow
from measure.accuracy.findings import CODE, COPY, NEEDLE, PERPLEXITY, RECALL, RESTATE, Kind, pooled
from measure.accuracy.metrics import Measure
from measure.accuracy.results import Results

PANELS: Final[tuple[tuple[Kind, str], ...]] = (
    (PERPLEXITY, "held-out perplexity"),
    (COPY, "copying: tokens right, mean of all distances"),
    (RECALL, "recall: tokens right, mean of all lengths"),
    (NEEDLE, "needle: tokens right, mean of all lengths"),
    (CODE, "code: edit similarity"),
    (RESTATE, "restate: ROUGE-1, mean of both lengths"),
    (("data", Measure.EDIT), "your data: edit similarity"),
)
STYLES: Final = {"exact": "k*", "open-page rule, nearest": "C0o", "open-page rule, stochastic": "C1s", "4-bit K": "C2D"}
OTHERS: Final = {"ablation": "C7x", "paper": "C3^", "rot": "C4P", "rot, plain": "C6P", "rot, calibrated": "C5X"}
SIZE, DPI, WIDTH = (4.2, 3.2), 80, 3
TICKS = (300, 400, 500, 700, 1000, 2000, 4000)


def draw(results: Results, path: Path) -> bool:
    """Write the picture; False if no panel has a measurement."""
    panels = [(kind, title) for kind, title in PANELS if pooled(results, results.rows[0].name, kind)]
    if not panels:
        return False
    wide = min(WIDTH, len(panels))
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(SIZE[0] * wide, SIZE[1] * high + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(high, wide, i + 1) for i in range(len(panels))]
    for ax, (kind, title) in zip(axes, panels, strict=True):
        _panel(ax, results, kind, title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)
    return True


def _panel(ax: Axes, results: Results, kind: Kind, title: str) -> None:
    rows = sorted(results.rows, key=lambda row: (row.family, row.bytes_per_token))
    for family, members in groupby(rows, key=lambda row: row.family):
        _family(ax, results, kind, family, list(members))
    ax.set_title(title, fontsize=9)
    ax.set_xscale("log")
    ax.set_xlabel("bytes of KV per token, all layers", fontsize=8)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    low, high = rows[0].bytes_per_token, rows[0].bytes_per_token
    for row in rows:
        low, high = min(low, row.bytes_per_token), max(high, row.bytes_per_token)
    ax.set_xticks([tick for tick in TICKS if 0.9 * low <= tick <= 1.1 * high] or [low, high])
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)


def _family(ax: Axes, results: Results, kind: Kind, family: str, rows: Sequence[VariantRow]) -> None:
    style = {**STYLES, **OTHERS}.get(family, "C8.")
    line = "-" if style in (STYLES["open-page rule, nearest"], STYLES["open-page rule, stochastic"]) else ""
    found = [(row, pooled(results, row.name, kind)) for row in rows]
    found = [(row, cells) for row, cells in found if cells]
    if not found:
        return
    at = [row.bytes_per_token for row, _ in found]
    values = np.array([np.mean([cell.score.value for cell in cells]) for _, cells in found])
    ax.plot(at, values, style + line, label=family, markersize=6, alpha=0.85)
