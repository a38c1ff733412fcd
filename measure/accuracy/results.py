"""All files of one model together: every score with its interval, and its change from exact KV on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from hackkv.errors import ConfigError
from measure.accuracy import cells, stats
from measure.accuracy.cells import Cell, Found, TaskNote, VariantRow
from measure.accuracy.metrics import Measure, edit_similarity, first_divergence
from measure.accuracy.stats import ConfidenceInterval, Floats
from measure.accuracy.suite import SUITE
from measure.accuracy.task import Task, writes
from measure.accuracy.variants import EXACT, VARIANTS

T = TypeVar("T")

KEPT: Final = frozenset((Measure.NEEDLE, Measure.RECALL, Measure.PASS))
"""Yes-or-no measures for which a codec is scored only on the samples that exact KV gets right."""


@dataclass(frozen=True, slots=True)
class Score:
    """One cell of the table."""

    variant: str
    task: str
    point: int
    measure: Measure
    score: ConfidenceInterval
    change: ConfidenceInterval
    """Change from exact KV on the same samples: a difference, or for perplexities and lengths the ratio minus 1."""
    samples: list[float]
    """Every sample's score; for perplexity in nats per token."""
    asked: int
    """Number of samples before those that exact KV fails are left out; else the length of `samples`."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy runs of one variant beside those of exact KV."""

    variant: str
    tokens: int
    """Length of the runs."""
    first_divergences: list[int | None]
    """First divergence of each run, counted from 0; None if both runs agree to the end."""

    def diverged_within(self, tokens: int) -> float:
        """Share of runs whose first `tokens` tokens are not all the same."""
        return float(np.mean([at is not None and at < tokens for at in self.first_divergences]))


@dataclass(frozen=True, slots=True)
class Results:
    """All measurements of one model. Rows and tasks are in the order of their tables, exact KV first."""

    model: str
    chats: bool
    """Whether no file is of a task for models without a chat template."""
    files: list[Cell]
    tasks: list[TaskNote]
    rows: list[VariantRow]
    scores: list[Score]
    agreement: list[Agreement] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Rows and tasks that answered other material than exact KV did, so that they cannot be compared."""

    def find(self, variant: str, task: str, point: int, measure: Measure) -> Score | None:
        """One cell; None if it was not measured."""
        for cell in self.scores:
            if (cell.variant, cell.task, cell.point, cell.measure) == (variant, task, point, measure):
                return cell
        return None


def read(folder: Path) -> Results:
    """The results in the folder of one model. Raises `ConfigError` if exact KV is not among the rows."""
    files = sorted(cells.cells(folder), key=lambda cell: (_place_of_row(cell.row.name), _place_of_task(cell.task.name)))
    exact = {cell.task.name: cell for cell in files if cell.row.name == EXACT.name}
    if not exact:
        raise ConfigError(f"{folder}: no file of the row {EXACT.name}, with which all others are compared")
    fair = [cell for cell in files if cell.task.name in exact and _same_material(cell, exact[cell.task.name])]
    stale = [f"{cell.row.name}/{cell.task.name}" for cell in files if cell not in fair]
    rows = {cell.row.name: cell.row for cell in fair}
    only_writes = {task.name for task in SUITE if task.suits is writes}
    chats = not any(cell.task.name in only_writes for cell in fair)
    scores = [score for cell in fair for score in _scores(cell, exact[cell.task.name])]
    names = list(dict.fromkeys(cell.task.name for cell in sorted(fair, key=lambda c: _place_of_task(c.task.name))))
    notes = [exact[name].task for name in names]
    return Results(
        exact[names[0]].model, chats, fair, notes, list(rows.values()), scores, _agreements(fair, exact), stale
    )


def _same_material(cell: Cell, exact: Cell) -> bool:
    shared = ("task", "material", "model_hash", "dtype")
    return all(cell.key.get(name) == exact.key.get(name) for name in shared)


def _place_of_row(name: str) -> tuple[int, str]:
    """The sort key of a row. Calibrated rows follow the row that they calibrate; rows of older tables come last."""
    names = [variant.name for variant in VARIANTS]
    bare = name.removesuffix("-calibrated")
    return (names.index(bare) if bare in names else len(names), name)


def _place_of_task(name: str) -> int:
    names = [task.name for task in SUITE]
    return names.index(name) if name in names else len(names)


# Scores -------------------------------------------------------------------------------------------------------------


def _scores(cell: Cell, exact: Cell) -> list[Score]:
    task = next((task for task in SUITE if task.name == cell.task.name), None)
    if task is None:
        return []
    points = [(point, found, exact.points[point]) for point, found in cell.points.items() if point in exact.points]
    return [
        score
        for measure in task.measures
        for point, found, wanted in points
        if (score := _score(cell, task, point, measure, found, wanted)) is not None
    ]


def _score(cell: Cell, task: Task, point: int, measure: Measure, found: Found, exact: Found) -> Score | None:
    values = _values(measure, found, exact)
    if values is None:
        return None
    ours, theirs = values
    asked = len(ours)
    if measure in KEPT and cell.row.name != EXACT.name:
        ours, theirs = ours[theirs == 1], theirs[theirs == 1]
        if not len(ours):
            return None
    score, change = _intervals(measure)(ours, theirs)
    return Score(cell.row.name, task.name, point, measure, score, change, ours.tolist(), asked)


def _values(measure: Measure, found: Found, exact: Found) -> tuple[Floats, Floats] | None:
    """Scores of a row and of exact KV; None unless both have the measure."""
    if measure is Measure.SAME:
        return _compared(found.ids, exact.ids, lambda a, b: float(a == b))
    if measure is Measure.SIMILAR:
        return _compared(found.texts, exact.texts, edit_similarity)
    if measure not in found.scores or measure not in exact.scores:
        return None
    return np.array(found.scores[measure]), np.array(exact.scores[measure])


def _compared(ours: Sequence[T], exact: Sequence[T], compare: Callable[[T, T], float]) -> tuple[Floats, Floats]:
    return np.array([compare(a, b) for a, b in zip(ours, exact, strict=True)]), np.ones(len(exact))


def _intervals(measure: Measure) -> Callable[[Floats, Floats], tuple[ConfidenceInterval, ConfidenceInterval]]:
    if measure.is_perplexity:
        return lambda ours, exact: (stats.perplexity(ours), stats.ratio(ours, exact))
    if measure is Measure.LENGTH:
        return lambda ours, exact: ((found := stats.ratio_of_sums(ours, exact)), found.minus(1))
    if measure is Measure.KL:
        return lambda ours, exact: (stats.mean(ours), stats.mean(ours))
    return lambda ours, exact: (stats.share(ours), stats.change(ours, exact))


# Agreement ----------------------------------------------------------------------------------------------------------


def _agreements(files: Sequence[Cell], exact: dict[str, Cell]) -> list[Agreement]:
    """First divergences from exact KV over all freely written answers."""
    runs = dict[str, list[tuple[list[int], list[int]]]]()
    for cell in files:
        for point, found in cell.points.items():
            wanted = exact[cell.task.name].points.get(point)
            if wanted is not None and found.ids and cell.row.name != EXACT.name:
                runs.setdefault(cell.row.name, []).extend(zip(found.ids, wanted.ids, strict=True))
    return [
        Agreement(
            name,
            max(len(wanted) for _, wanted in pairs),
            [first_divergence(np.array(said), np.array(wanted)) for said, wanted in pairs],
        )
        for name, pairs in runs.items()
    ]
