"""The results as a table on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from measure.accuracy.findings import findings
from measure.accuracy.metrics import Measure
from measure.accuracy.results import Results, Score
from measure.accuracy.variants import EXACT

PLACES = (1, 4, 8, 16, 32, 48)
"""Positions at which first divergences are reported."""

NAME_COLUMNS, SCORE_COLUMNS = 36, 13
"""Characters that a table's first two columns and each of the others take."""

FEWEST = 6
"""Samples below which no difference is called certain."""

LIMITS = """\
A model of a few million parameters can prove that codecs and kernels do what they should (prefill and decode agree,
settings that change nothing change nothing), and it can rank codecs where attention has to find something far away:
copying, recall and needles fail as soon as the wrong key wins, so they show the loss of 2-bit KV magnified. It can't
prove what a large model would lose: its keys and values lack the outlier channels of large models, it has few layers
for errors to grow through and few heads to average them out, and it can neither program nor summarise: edit similarity
of code only compares codecs with each other, and what stands for a summary is restating words that were given. Tables
6-8 of the paper are about models of 7B to 180B parameters on public data sets; to repeat those, give `--model` and
`--data`.
"""

READING = """\
Brackets are 95 % intervals: Wilson's for yes-or-no scores, the bootstrap over samples for all others. They hold the
luck of the samples, which all rows share; a star marks a cell whose paired difference from exact KV excludes zero.
Answers of copy, recall and needle are scored under teacher forcing, so one wrong token costs one token.
Windows of perplexity begin without context: up to Π tokens of each see no codes at all.
`hack-paper` quantizes K at once and keeps V of a query's own page in FP16, in prefill and decode alike. The paper's
prefill quantizes full blocks of V before the queries inside them read them, so taken by the letter it should lie
between `hack-paper` and `hack-paper-no-rqe`. The rows without RQE show a query its own page as codes in prefill too,
which the paper's Table 7 has on both sides of its comparison: what requantizing itself does is decode against prefill.
"""


def terminal_tables(results: Results, width: int) -> Iterable[Table]:
    """One line per row, one column per task and point, with the task's first measure. Split to fit `width`.

    The split is made here because rich cuts names and numbers short when a table is too wide.
    """
    heads = list(dict.fromkeys((s.task, s.point, s.measure) for s in results.scores if _is_main(results, s)))
    abreast = max(1, (width - NAME_COLUMNS) // SCORE_COLUMNS)
    for begin in range(0, len(heads), abreast):
        part = heads[begin : begin + abreast]
        table = Table("row", "B/token", *(_head(task, point) for task, point, _ in part))
        for row in results.rows:
            cells = (results.find(row.name, *head) for head in part)
            table.add_row(row.name, f"{row.bytes_per_token:.0f}", *(_plain(cell) if cell else "" for cell in cells))
        yield table


def markdown(results: Results, plot: str) -> str:
    """The whole report; `plot` is the picture's path as the report should link it, or empty."""
    parts = [
        "# Accuracy of the KV codecs",
        f"\nMade by `{results.command}`; not edited by hand.\n",
        *_bullets(_circumstances(results)),
        "## What this can and can't prove\n",
        LIMITS,
        "## What the numbers say\n",
        *_bullets(findings(results)),
        "## Rows\n",
        *_rows(results),
        *([f"![accuracy against bytes per token]({plot})\n"] if plot else []),
        "## Scores\n",
        READING,
        *_scores(results),
        "## Greedy agreement\n",
        *_agreement(results),
    ]
    return "\n".join(parts)


def _circumstances(results: Results) -> Iterable[str]:
    settings, machine = results.settings, results.machine
    yield f"Model: {settings.model} (hash {settings.model_hash[:12]}), {settings.dtype}."
    yield f"Held-out text: {settings.held_out}"
    yield f"Seed {settings.seed}; sample i of a task is drawn with seed {settings.seed} + i."
    versions = f"Python {machine.python}, torch {machine.torch}"
    yield f"Machine: {machine.cpu}, {machine.cores} cores, {machine.system}, {versions}"
    yield f"Kernels: {machine.backend}; prompts in chunks of {settings.chunk_tokens} tokens; {machine.jobs} jobs"
    yield f"Commit {results.commit}; began {results.began}, took {results.seconds / 60:.1f} minutes"
    yield from (f"Left out: {line}" for line in settings.left_out)


def _rows(results: Results) -> Iterable[str]:
    exact = results.rows[0].bytes_per_token
    yield "| row | what it is | bytes/token | of exact | on the wire |"
    yield "|---|---|---|---|---|"
    for row in results.rows:
        share = f"{row.bytes_per_token / exact:.1%}"
        yield f"| `{row.name}` | {row.says} | {row.bytes_per_token:.0f} | {share} | {row.wire_bytes_per_token:.0f} |"
    yield ""


def _scores(results: Results) -> Iterable[str]:
    says = {task.name: task for task in results.tasks}
    kinds = dict.fromkeys((s.task, s.measure) for s in results.scores)
    for task, group in groupby(kinds, key=lambda kind: kind[0]):
        note = says[task]
        yield f"### {task}: {note.says} ({note.samples} samples{' at each' if len(note.points) > 1 else ''})\n"
        for _, measure in group:
            yield from _one_table(results, task, measure)


def _one_table(results: Results, task: str, measure: Measure) -> Iterable[str]:
    points = list(dict.fromkeys(s.point for s in results.scores if (s.task, s.measure) == (task, measure)))
    heads = [f"{measure} at {point}" if point else str(measure) for point in points]
    yield f"| row | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for row in results.rows:
        cells = [results.find(row.name, task, point, measure) for point in points]
        yield f"| `{row.name}` | {' | '.join(_long(cell) if cell else '' for cell in cells)} |"
    yield ""


def _agreement(results: Results) -> Iterable[str]:
    if not results.agreement:
        yield "No task of this run writes freely.\n"
        return
    runs = len(results.agreement[0].first_divergences)
    yield f"Share of {runs} greedy runs that have left exact KV's within so many tokens.\n"
    places = [place for place in PLACES if place <= results.agreement[0].tokens]
    yield f"| row | {' | '.join(map(str, places))} |"
    yield f"|---|{'---|' * len(places)}"
    for one in results.agreement:
        yield f"| `{one.variant}` | {' | '.join(f'{one.diverged_within(place):.2f}' for place in places)} |"
    yield ""


def _bullets(lines: Iterable[str]) -> list[str]:
    return [*(f"- {line}" for line in lines), ""]


def _is_main(results: Results, cell: Score) -> bool:
    first = next(s for s in results.scores if s.task == cell.task)
    return cell.measure == first.measure


def _head(task: str, point: int) -> str:
    return f"{task}\n{point}" if point else task


def _value(cell: Score, value: float) -> str:
    return f"{value:.2f}" if cell.measure.is_perplexity else f"{value:.3f}"


def _star(cell: Score) -> str:
    """A star where the paired change excludes zero. Very few samples get none, since their bootstrap says nothing."""
    certain = cell.change.low > 0 or cell.change.high < 0
    return "*" if certain and len(cell.samples) >= FEWEST and cell.variant != EXACT.name else ""


def _plain(cell: Score) -> str:
    return f"{_value(cell, cell.score.value)}{_star(cell)}"


def _long(cell: Score) -> str:
    low, high = _value(cell, cell.score.low), _value(cell, cell.score.high)
    return f"{_value(cell, cell.score.value)}{_star(cell).replace('*', chr(92) + '*')} [{low}, {high}]"
