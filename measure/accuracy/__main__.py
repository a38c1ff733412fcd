"""`hackkv eval`: measure what every codec costs in accuracy, and write the report.

Without arguments it takes the model that ships with hackkv, all rows and all tasks. Writes OUT.md, OUT.json and
OUT.png. `--render OUT.json` writes report and picture of an earlier run again. `--recommend MODEL` prints one table
instead: every preset, what it weighs and what it costs this model.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import torch
from hack_kernels import load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hackkv.config import ModelConfig
from hackkv.errors import ConfigError, HackkvError
from measure.accuracy import results as results_of
from measure.accuracy import suite, variants
from measure.accuracy.data import read_records
from measure.accuracy.engine import CHUNK_TOKENS
from measure.accuracy.machine import commit, this_machine
from measure.accuracy.plot import draw
from measure.accuracy.recommend import recommend, show
from measure.accuracy.report import markdown, terminal_tables
from measure.accuracy.results import Results, TaskNote
from measure.accuracy.run import Answers, answer_all
from measure.accuracy.subject import Subject, load_subject
from measure.accuracy.suite import Column
from measure.accuracy.variants import Variant


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, report; returns the exit code."""
    args = _parser().parse_args(arguments)
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        if args.recommend is not None:
            config = ModelConfig(path=args.recommend, dtype=args.dtype, threads=args.jobs, backend=args.backend)
            show(recommend(config, lambda line: notes.print(line, markup=False)), console)
            return 0
        results = Results.read(args.render) if args.render else _measure(args, _command(arguments), notes)
    except HackkvError as error:
        notes.print(f"hackkv eval: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    for table in terminal_tables(results, console.width):
        console.print(table)
    _write(results, args.out if not args.render else args.render.with_suffix(""), console)
    return 0


def _parser() -> argparse.ArgumentParser:
    names = f"rows: {', '.join(v.name for v in variants.VARIANTS)}\ntasks:\n"
    names += "\n".join(f"  {task.name:11} {task.says}" for task in suite.SUITE)
    parser = argparse.ArgumentParser(
        "hackkv eval", description=__doc__, epilog=names, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="checkpoint folder or hub name; default: the shipped model")
    parser.add_argument(
        "--data", type=Path, help='JSONL with {"prompt": ..., "answer": ...} per line; adds task `data`'
    )
    parser.add_argument("--variants", type=_names, default=(), help="rows, separated by commas; default: all")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of `hackkv calibrate`; adds the rows rot-*-calibrated"
    )
    parser.add_argument("--tasks", type=_names, default=(), help="tasks, separated by commas; default: all")
    parser.add_argument("--samples", type=_positive, default=0, help="samples per task and point; default: the task's")
    parser.add_argument("--longest", type=_positive, default=0, help="leave out points that need more context")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--out", type=Path, default=Path("accuracy"), help="where to write, without suffix")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--backend", default="auto", help="kernels; default: the fastest of this machine")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="threads; default: all cores")
    parser.add_argument(
        "--recommend",
        nargs="?",
        const="",
        metavar="MODEL",
        help="only measure what each preset costs this model (default: the shipped one), and recommend one",
    )
    parser.add_argument("--render", type=Path, metavar="JSON", help="only write the report of an earlier run again")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _measure(args: argparse.Namespace, command: str, console: Console) -> Results:
    began, clock, code = datetime.now(UTC), perf_counter(), commit()  # others may commit while we run
    rows, tasks = variants.choose(args.variants, args.calibration), suite.choose(args.tasks)
    records = read_records(args.data) if args.data else ()
    torch.set_num_threads(1)
    subject = load_subject(ModelConfig(path=args.model, dtype=args.dtype, threads=1, backend=args.backend), records)
    columns, left_out = suite.columns(subject, tasks, samples=args.samples, seed=args.seed, longest=args.longest)
    for line in left_out:
        console.print(f"left out: {line}", style="yellow", markup=False, soft_wrap=True)
    if not columns:
        raise ConfigError("nothing to measure: no task is left")
    answers = _answer(subject, rows, columns, args.jobs, console)
    pairs = list(zip(columns, answers, strict=True))
    seconds = perf_counter() - clock
    settings = results_of.Settings(
        model=subject.worker.name,
        model_hash=dict(subject.worker.fingerprint.fields)["model_hash"],
        dtype=args.dtype,
        backend=args.backend,
        held_out=subject.source,
        seed=args.seed,
        chunk_tokens=CHUNK_TOKENS,
        longest=args.longest,
        left_out=left_out,
    )
    return Results(
        command=command,
        began=began.isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        commit=code,
        machine=this_machine(load(args.backend).name, args.jobs),
        settings=settings,
        tasks=_task_notes(columns),
        rows=[results_of.row_of(row, subject.with_codec(row.codec)) for row in rows],
        scores=[s for column, given in pairs for s in results_of.score_column(column, given, subject.decode)],
        agreement=results_of.agreement_of(
            [row.name for row in rows], [given for column, given in pairs if column.task.is_free]
        ),
    )


def _answer(
    subject: Subject, rows: Sequence[Variant], columns: Sequence[Column], jobs: int, console: Console
) -> Answers:
    """Run everything under a progress bar."""
    fields = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*fields, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(rows) * sum(len(column.examples) for column in columns))

        def on_answers(row: Variant, column: Column, count: int) -> None:
            what = f"{column.task.name} {column.point}: {row.name}"
            progress.update(bar, advance=count, description=what)
            if not console.is_terminal:  # a log shows no progress bar
                console.print(f"{progress.tasks[0].percentage:5.1f} %  {what}")

        return answer_all(subject, rows, columns, jobs, on_answers)


def _task_notes(columns: Sequence[Column]) -> list[TaskNote]:
    notes: dict[str, TaskNote] = {}
    for column in columns:
        task = column.task
        note = notes.setdefault(task.name, TaskNote(task.name, task.says, [], len(column.examples)))
        note.points.append(column.point)
    return list(notes.values())


def _command(arguments: Sequence[str] | None) -> str:
    return shlex.join(["hackkv", "eval", *(sys.argv[1:] if arguments is None else arguments)])


def _write(results: Results, out: Path, console: Console) -> None:
    """Write the report, its numbers and its picture into one folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files = {suffix: out.with_name(out.name + suffix) for suffix in (".json", ".png", ".md")}
    results.save(files[".json"])
    drawn = draw(results, files[".png"])
    files[".md"].write_text(markdown(results, files[".png"].name if drawn else ""), encoding="utf-8")
    console.print(
        f"wrote {', '.join(str(path) for path in files.values() if drawn or path.suffix != '.png')}", soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main())
