"""What a run leaves behind: every setting, every score with its interval, and the scores of single samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from hackkv.model.worker import Worker
from measure.accuracy import stats
from measure.accuracy.machine import Machine
from measure.accuracy.metrics import Answered, Decode, Measure, first_divergence, score
from measure.accuracy.stats import Floats, Interval
from measure.accuracy.suite import Column
from measure.accuracy.variants import EXACT, Setting, Variant


@dataclass(frozen=True, slots=True)
class Row:
    """One variant and the bytes of its pages, over all layers and KV heads."""

    name: str
    says: str
    family: str
    codec: str
    settings: dict[str, Setting]
    fingerprint: dict[str, str]
    bytes_per_token: float
    """Of sealed pages at rest."""
    wire_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Score:
    """One cell of the table."""

    variant: str
    task: str
    point: int
    measure: Measure
    score: Interval
    change: Interval
    """Against exact KV on the same samples: a difference, or for perplexity the ratio minus 1."""
    samples: list[float]
    """Every sample's score; for perplexity nats per token."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy runs of one variant beside those of exact KV."""

    variant: str
    tokens: int
    """Length of the runs."""
    first_divergences: list[int | None]
    """Per run, counted from 0; None where both agree to the end."""

    def diverged_within(self, tokens: int) -> float:
        """Share of runs whose first `tokens` tokens are not all the same."""
        return float(np.mean([at is not None and at < tokens for at in self.first_divergences]))


@dataclass(frozen=True, slots=True)
class TaskNote:
    """What a task was, for the report."""

    name: str
    says: str
    points: list[int]
    samples: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the numbers."""

    model: str
    model_hash: str
    dtype: str
    backend: str
    held_out: str
    seed: int
    chunk_tokens: int
    longest: int
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run."""

    command: str
    began: str
    seconds: float
    commit: str
    machine: Machine
    settings: Settings
    tasks: list[TaskNote]
    rows: list[Row]
    scores: list[Score]
    agreement: list[Agreement] = field(default_factory=list)

    def find(self, variant: str, task: str, point: int, measure: Measure) -> Score | None:
        """One cell, None if it was not measured."""
        for cell in self.scores:
            if (cell.variant, cell.task, cell.point, cell.measure) == (variant, task, point, measure):
                return cell
        return None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_bytes(_ADAPTER.dump_json(self, indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `save` wrote."""
        return _ADAPTER.validate_json(path.read_bytes())


_ADAPTER = TypeAdapter(Results)


def row_of(variant: Variant, worker: Worker) -> Row:
    """The table's row of a variant, with the bytes of its pages."""
    weighs = worker.footprint
    return Row(
        variant.name,
        variant.says,
        variant.family,
        variant.codec.name,
        variant.codec.settings,
        dict(worker.codec.fingerprint()),
        weighs.page_bytes / weighs.page_tokens,
        weighs.wire_page_bytes / weighs.page_tokens,
    )


def score_column(column: Column, answers: dict[str, list[Answered]], decode: Decode) -> list[Score]:
    """Every measure of a column for every variant; exact KV must be among them."""
    out = []
    for measure in column.task.measures:
        values = {name: np.array([score(measure, one, decode) for one in given]) for name, given in answers.items()}
        exact = values[EXACT.name]
        for name, scores in values.items():
            rounded = [round(value, 6) for value in scores.tolist()]
            cell = _cell(measure, scores, exact)
            out.append(Score(name, column.task.name, column.point, measure, *cell, rounded))
    return out


def _cell(measure: Measure, scores: Floats, exact: Floats) -> tuple[Interval, Interval]:
    if measure.is_perplexity:
        return stats.perplexity(scores), stats.ratio(scores, exact)
    return stats.share(scores), stats.change(scores, exact)


def agreement_of(names: Sequence[str], free: Iterable[dict[str, list[Answered]]]) -> list[Agreement]:
    """First divergences from exact KV over all freely written answers."""
    runs = list(free)
    if not runs:
        return []
    tokens = max(len(one.truth) for answers in runs for one in answers[EXACT.name])
    return [
        Agreement(
            name,
            tokens,
            [
                first_divergence(said.ids, exact.ids)
                for answers in runs
                for said, exact in zip(answers[name], answers[EXACT.name], strict=True)
            ],
        )
        for name in names
        if name != EXACT.name
    ]
