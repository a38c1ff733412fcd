"""`hackkv bench plot`: job completion time by stage, a bar for each run, as in the paper's Fig. 10."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table

from hackkv.errors import ConfigError, HackkvError
from hackkv.timing import Stage, SubStage

PARTS: Final = (
    (Stage.ROUTER_QUEUE, "#b8b8b8"),
    (Stage.PREFILL_QUEUE, "#8f8f8f"),
    (Stage.PREFILL, "#3b6fb6"),
    (SubStage.QUANTIZE, "#9dbbe3"),
    (Stage.SWAP_WAIT, "#7a5195"),
    (Stage.TRANSFER, "#d9534f"),
    (Stage.DECODE_QUEUE, "#c9b458"),
    (Stage.DECODE, "#3f8f5b"),
    (SubStage.APPROXIMATION, "#a5d6b7"),
    (Stage.STREAM, "#5a5a5a"),
)
"""The parts of a bar, from the bottom up. A stage's part leaves out its sub-stages, which have parts of their own."""
INSIDE: Final = {SubStage.QUANTIZE: Stage.PREFILL, SubStage.APPROXIMATION: Stage.DECODE}
HEIGHT, DPI = 3.6, 110


class StageMilliseconds(BaseModel):
    """Statistics of one stage, in milliseconds."""

    model_config = ConfigDict(frozen=True)

    mean: float


class ResultFile(BaseModel):
    """The fields of a result file that are read."""

    model_config = ConfigDict(frozen=True)

    label: str
    stages: dict[Stage, StageMilliseconds]
    sub_stages: dict[SubStage, StageMilliseconds]
    mean_e2el_ms: float

    def parts(self) -> dict[Stage | SubStage, float]:
        """Mean milliseconds of each part; they sum to the job completion time."""
        parts: dict[Stage | SubStage, float] = {stage: self.stages[stage].mean for stage in Stage}
        for part, stage in INSIDE.items():
            parts[part] = min(self.sub_stages[part].mean, parts[stage])
            parts[stage] -= parts[part]
        return parts


def read_run(path: Path) -> ResultFile:
    """Read a result file. Raises `ConfigError` naming the file if it is no result with stages."""
    try:
        return ResultFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: no result of hackkv bench serve with stages: {field}: {first['msg']}") from error


def draw(runs: Sequence[ResultFile], path: Path) -> None:
    """Write the picture; the suffix of `path` says which format."""
    figure = Figure(figsize=(2.6 + 1.1 * len(runs), HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tops = [0.0] * len(runs)
    parts = [run.parts() for run in runs]
    for part, colour in PARTS:
        heights = [each[part] for each in parts]
        if sum(heights) < 0.001 * sum(run.mean_e2el_ms for run in runs):
            continue  # no entry in the legend for a part that cannot be seen
        axes.bar(range(len(runs)), heights, bottom=tops, color=colour, label=part, width=0.62)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for x, (top, run) in enumerate(zip(tops, runs, strict=True)):
        axes.annotate(f"{run.mean_e2el_ms:,.0f} ms", (x, top), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(runs)), [run.label for run in runs])
    axes.set_ylabel("mean job completion time, ms")
    axes.set_ylim(0, 1.12 * max(tops))
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=DPI)


def print_table(runs: Sequence[ResultFile], console: Console) -> None:
    """Print the numbers of the picture."""
    table = Table("mean, ms", title="job completion time by stage", title_justify="left")
    for run in runs:
        table.add_column(run.label, justify="right")
    parts = [run.parts() for run in runs]
    for part, _ in PARTS:
        table.add_row(part, *(f"{each[part]:.2f}" for each in parts))
    table.add_section()
    table.add_row("sum of the stages", *(f"{sum(each.values()):.2f}" for each in parts), style="bold")
    table.add_row("as the client saw it", *(f"{run.mean_e2el_ms:.2f}" for run in runs))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print, draw; returns the exit code."""
    parser = argparse.ArgumentParser("hackkv bench plot", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="files that bench serve wrote")
    parser.add_argument("--out", type=Path, default=Path("jct.png"), help="picture to write; default: jct.png")
    args = parser.parse_args(arguments)
    try:
        runs = [read_run(path) for path in args.results]
    except HackkvError as error:
        Console(stderr=True).print(f"hackkv bench plot: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    console = Console(highlight=False)
    print_table(runs, console)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, args.out)
    console.print(f"wrote {args.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
