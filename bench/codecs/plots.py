"""KL against bytes and against job completion time. A line joins the codecs that no other codec beats in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.codecs.facts import SHORT, Facts
from bench.codecs.jct import LINKS
from bench.codecs.rows import ROWS
from bench.codecs.verdict import CODES

PROMPT: Final = "4k"
DPI: Final = 90

Point = tuple[str, float, float]
"""(name, cost, KL)"""
Panel = tuple[str, Sequence[Point], float | None]
"""(title, points, cost of exact KV)"""


def by_bytes(facts: Sequence[Facts], path: Path) -> bool:
    """KL against bytes at rest; False if there is nothing to draw."""
    points = [(each.row.name, each.share, each.lost[SHORT].kl) for each in _comparable(facts)]
    return _draw([("", points, None)], "bytes at rest, of FP16's", path)


def by_jct(facts: Sequence[Facts], path: Path) -> bool:
    """KL against seconds of a job, one panel for each link; False if there is nothing to draw.

    Exact KV has no place on a logarithmic axis of KL, so a line shows the time of its job.
    """
    exact = next((each for each in facts if each.row.name == "fp16"), None)
    panels = [
        (
            f"{PROMPT} tokens, {'free link' if link == 'none' else link}",
            [
                (each.row.name, seconds, each.lost[SHORT].kl)
                for each in _comparable(facts)
                if (seconds := each.jct_s(PROMPT, link)) is not None
            ],
            exact.jct_s(PROMPT, link) if exact else None,
        )
        for link in LINKS
    ]
    return _draw([panel for panel in panels if panel[1]], "seconds of a job", path)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats in both values, cheapest first."""
    kept = list[Point]()
    for point in sorted(points, key=lambda each: (each[1], each[2])):
        if not kept or point[2] < kept[-1][2]:
            kept.append(point)
    return kept


def _comparable(facts: Sequence[Facts]) -> Iterator[Facts]:
    """Facts of lossy rows that were scored on the same text."""
    for each in facts:
        if SHORT in each.lost and each.lost[SHORT].kl > 0 and not each.evicts and not each.row.is_strawman:
            yield each


def _draw(panels: Sequence[Panel], what: str, path: Path) -> bool:
    if not any(points for _, points, _ in panels):
        return False
    figure = Figure(figsize=(6.4 * len(panels), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, 1):
        _panel(figure.add_subplot(1, len(panels), number), panel, what)
    figure.savefig(path, dpi=DPI)
    return True


def _panel(ax: Axes, panel: Panel, what: str) -> None:
    title, points, exact = panel
    best = front(points)
    if exact is not None:
        ax.axvline(exact, linestyle="--", color="C2", label="fp16 (exact)")
    ax.plot([at for _, at, _ in best], [kl for *_, kl in best], "-", color="0.75", zorder=1)
    for codes, marker, label in ((True, "C0o", "attention on codes"), (False, "C1s", "dequantized or upcast")):
        some = [(at, kl) for name, at, kl in points if (ROWS[name].codec.name in CODES) is codes]
        ax.plot([at for at, _ in some], [kl for _, kl in some], marker, markersize=5, label=label)
    for name, at, kl in points:
        ax.annotate(name, (at, kl), xytext=(4, 3), textcoords="offset points", fontsize=7)
    ax.set_yscale("log")
    ax.set_xlabel(what, fontsize=9)
    ax.set_ylabel(f"KL at {SHORT:,} tokens, nats", fontsize=9)
    ax.set_title(title, fontsize=9)
    ax.margins(x=0.12)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, frameon=False)
