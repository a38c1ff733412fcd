"""The results as a table on the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.table import Table

from hackkv.model.shipped import SMOLLM2_NAME
from hackkv.packaged import SHIPPED_NAME, SMOLLM2
from measure.accuracy.cells import Cell
from measure.accuracy.engine import CHUNK_TOKENS as CHUNK
from measure.accuracy.findings import findings
from measure.accuracy.metrics import Measure
from measure.accuracy.results import KEPT, Results, Score
from measure.accuracy.variants import EXACT

SUMMARY_POINTS = (512, 2048, 8192)
PLACES = (1, 4, 8, 16, 32, 48, 128, 256)
"""Positions at which first divergences are reported."""

NAME_COLUMNS, SCORE_COLUMNS = 36, 13
"""Characters of a table's first two columns together, and of each other column."""

ALWAYS_WORSE = frozenset((Measure.KL, Measure.TOP1, Measure.SAME, Measure.SIMILAR))
"""Measures of distance from exact KV. They get no star: it would say nothing."""

FEWEST = 6
"""With fewer samples, no difference counts as certain."""

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

INTRODUCTION = """\
What KV in each codec costs a model, beside exact KV (`fp16`), through the serving path: packed pages, the kernels that
serve, prompts in chunks, answers token by token. Not edited by hand. Every row and task has a file of its own, which is
made once and again only if the codec, the kernels' name or the questions change.

Brackets are 95 % intervals: Wilson's for yes-or-no scores, the bootstrap over samples for all others. They hold the
luck of the samples, which all rows share; a star marks a cell whose paired difference from exact KV excludes zero.
Answers that are given (copying, recall, needles) are scored under teacher forcing, so one wrong token costs one token.
"""

REAL = """\
Perplexity, KL (of the next token, from exact KV, in nats) and top-1 (first choices that stay) are of the same windows:
the first tokens of long documents, read from an empty cache. Needles, recall, and tests passed: for `fp16` of all that
were asked, for the others of those that exact KV gets right. Length ratio: tokens of all answers over those of exact
KV's; unfinished: answers that are cut off at the limit.
"""

PAPER = """\
Windows of perplexity begin without context: up to Π tokens of each see no codes at all.
`hack-paper` quantizes K at once and keeps V of a query's own page in FP16, in prefill and decode alike. The paper's
prefill quantizes full blocks of V before the queries inside them read them, so taken by the letter it should lie
between `hack-paper` and `hack-paper-no-rqe`. The rows without RQE show a query its own page as codes in prefill too,
which the paper's Table 7 has on both sides of its comparison: what requantizing itself does is decode against prefill.
"""


def terminal_tables(results: Results, width: int) -> Iterable[Table]:
    """One line per row, one column per task and point, with the task's first measure, split to fit `width` characters.

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


def markdown(
    found: Sequence[Results], pictures: Mapping[str, str], advice: Mapping[str, str], tried: Mapping[str, str]
) -> str:
    """The whole report, models in the order given. By model: `pictures` are paths as the report links them, `advice` is
    the output of `--recommend`, and `tried` tells what was tried before there were presets."""
    parts = ["# Accuracy of the KV codecs\n", INTRODUCTION, *_bullets(_commands(found))]
    for results in found:
        parts += [f"## {results.model}\n", *_bullets(_circumstances(results))]
        parts += [REAL] if results.chats else [LIMITS, "What the numbers say:\n", *_bullets(findings(results))]
        if results.chats:
            parts += _summary(results)
        parts += _rows(results)
        if results.model in pictures:
            parts.append(f"![accuracy against bytes per token]({pictures[results.model]})\n")
        if results.model in tried:
            parts += [
                "### What was tried before presets were chosen: what helped, and what did not\n",
                tried[results.model],
            ]
        parts += [*_scores(results), *_agreement(results)]
        if results.model in advice:
            parts += [f"### `hackkv eval --recommend {_asked_as(results.model)}`\n", advice[results.model]]
        if not results.chats:
            parts.append(PAPER)
    return "\n".join(parts)


def _commands(found: Sequence[Results]) -> Iterable[str]:
    yield "`hackkv eval --out docs/accuracy --render` writes this page again from the files in docs/accuracy."
    for results in found:
        model = "" if results.model == SHIPPED_NAME else f" --model {_asked_as(results.model)}"
        yield f"`hackkv eval{model} --out docs/accuracy` measures what has changed of {results.model}."


def _asked_as(model: str) -> str:
    return SMOLLM2 if model == SMOLLM2_NAME else model


def _circumstances(results: Results) -> Iterable[str]:
    first, machines = results.files[0], dict.fromkeys(_machine(cell) for cell in results.files)
    yield f"Model hash {first.key['model_hash'][:12]}, {first.key['dtype']}; prompts in chunks of {CHUNK} tokens."
    yield f"Held-out text: {first.held_out}."
    yield from machines
    commits = dict.fromkeys(cell.commit for cell in results.files)
    began = sorted(cell.began for cell in results.files)
    hours = sum(cell.seconds for cell in results.files) / 3600
    yield f"Measured from {began[0][:10]} to {began[-1][:10]} at {', '.join(commits)}; {hours:.1f} hours of jobs."
    yield from dict.fromkeys(f"Left out: {note.name} {line}" for note in results.tasks for line in note.left_out)
    if begun := [f"{cell.row.name}/{cell.task.name}" for cell in results.files if not cell.complete]:
        yield f"Not finished, so that points are missing: {', '.join(begun)}."
    if results.stale:
        yield f"Not shown, as they were asked other questions than exact KV: {', '.join(results.stale)}."


def _machine(cell: Cell) -> str:
    machine = cell.machine
    versions = f"Python {machine.python}, torch {machine.torch}"
    where = f"{machine.cpu}, {machine.cores} cores, {machine.system}, {versions}"
    return f"Machine: {where}; kernels: {re.sub(', pages by [^)]*', '', cell.key['kernels'])}."


def _summary(results: Results) -> Iterable[str]:
    """Bytes and reading scores of every row, at the lengths by which presets are chosen."""
    points = [p for p in SUMMARY_POINTS if results.find(results.rows[0].name, "reading", p, Measure.KL)]
    if not points:
        return
    heads = [f"{what} at {point:,}" for point in points for what in ("perplexity", "change", "KL", "top-1")]
    yield f"| row | of FP16's bytes | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(heads)}"
    for row in results.rows:
        if not any(results.find(row.name, "reading", point, Measure.KL) for point in points):
            continue  # nothing is read of a codec that evicts rows of whole prompts
        cells = [text for point in points for text in _read_at(results, row.name, point)]
        yield f"| `{row.name}` | {row.share:.1%} | {' | '.join(cells)} |"
    yield ""


def _read_at(results: Results, row: str, point: int) -> list[str]:
    measures = (Measure.PERPLEXITY, Measure.KL, Measure.TOP1)
    perplexity, kl, top1 = (results.find(row, "reading", point, measure) for measure in measures)
    if perplexity is None or kl is None or top1 is None:
        return [""] * 4
    value = perplexity.score.value
    return [
        f"{value:.2f}" if value < 1000 else f"{value:.0f}",
        f"{perplexity.change.value:+.1%}",
        f"{kl.score.value:.4f}",
        f"{top1.score.value:.3f}",
    ]


def _rows(results: Results) -> Iterable[str]:
    yield "| row | what it is | bytes/token | of FP16 | on the wire |"
    yield "|---|---|---|---|---|"
    for row in results.rows:
        share = f"{row.share:.1%}"
        yield f"| `{row.name}` | {row.says} | {row.bytes_per_token:.0f} | {share} | {row.wire_bytes_per_token:.0f} |"
    yield ""


def _scores(results: Results) -> Iterable[str]:
    says = {task.name: task for task in results.tasks}
    kinds = dict.fromkeys((s.task, s.measure) for s in results.scores)
    for task, group in groupby(kinds, key=lambda kind: kind[0]):
        note = says[task]
        yield f"### {task}: {note.says} ({note.samples})\n"
        for _, measure in group:
            yield from _one_table(results, task, measure)


def _one_table(results: Results, task: str, measure: Measure) -> Iterable[str]:
    points = list(dict.fromkeys(s.point for s in results.scores if (s.task, s.measure) == (task, measure)))
    heads = [f"{measure} at {point:,}" if point else str(measure) for point in points]
    yield f"| row | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for row in results.rows:
        cells = [results.find(row.name, task, point, measure) for point in points]
        if any(cells):
            yield f"| `{row.name}` | {' | '.join(_long(cell) if cell else '' for cell in cells)} |"
    yield ""


def _agreement(results: Results) -> Iterable[str]:
    if not results.agreement:
        return
    runs = max(len(one.first_divergences) for one in results.agreement)
    yield f"### Greedy agreement\n\nShare of {runs} greedy answers that have left exact KV's within so many tokens.\n"
    places = [place for place in PLACES if place <= max(one.tokens for one in results.agreement)]
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
    if cell.measure.is_perplexity:
        return f"{value:.2f}" if value < 1000 else f"{value:.0f}"
    return f"{value:.4f}" if cell.measure is Measure.KL else f"{value:.3f}"


def _star(cell: Score) -> str:
    """A star if the paired change excludes zero. Very few samples get none, since their bootstrap says nothing."""
    certain = cell.change.low > 0 or cell.change.high < 0
    starred = certain and len(cell.samples) >= FEWEST and cell.variant != EXACT.name
    return "*" if starred and cell.measure not in ALWAYS_WORSE else ""


def _plain(cell: Score) -> str:
    return f"{_value(cell, cell.score.value)}{_star(cell)}"


def _long(cell: Score) -> str:
    """A score with its interval. Counted measures show how many of how many."""
    low, high = _value(cell, cell.score.low), _value(cell, cell.score.high)
    value = _value(cell, cell.score.value)
    if cell.measure in KEPT:
        value = f"{round(sum(cell.samples))} of {len(cell.samples)}"
    return f"{value}{_star(cell).replace('*', chr(92) + '*')} [{low}, {high}]"
