"""`hackkv eval`: measure what every codec costs in accuracy, and write the report.

Without arguments it takes the model that ships with hackkv and all rows; a chat model is asked the tasks for chat.
Every row and task has a file of its own, OUT/MODEL/ROW/TASK.json. A file is made once, point by point: the command may
be stopped and given again, and after a change of a codec it measures that codec alone. OUT.md reports on all models in
OUT.
`--recommend MODEL` prints one table instead: every preset, its size and its cost to this model, and which one to serve
over a link of `--link-gbit-s`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from hack_kernels import load
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hackkv.config import ModelConfig
from hackkv.errors import ConfigError, HackkvError
from measure.accuracy import cells, results, run, suite, variants
from measure.accuracy.data import read_records
from measure.accuracy.machine import commit, this_machine
from measure.accuracy.plot import draw
from measure.accuracy.recommend import LINK_GBIT_S, as_markdown, recommend, show
from measure.accuracy.report import markdown, terminal_tables
from measure.accuracy.run import Pending, RunOutput
from measure.accuracy.subject import Subject, load_subject
from measure.accuracy.task import Prepared, RunLimits, Task, writes

OUT: Final = Path("accuracy")
RECOMMENDED: Final = "recommended.md"
"""The output of `--recommend`, in the folder of a model."""
TRIED: Final = "tried.md"
"""The results of a search for formats of a model, in its folder; written by hand."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, report; returns the exit code."""
    args = _parser().parse_args(arguments)
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        if args.recommend is not None:
            how = {"dtype": args.dtype, "weights": args.weights, "threads": args.jobs, "backend": args.backend}
            _recommend(ModelConfig(path=args.recommend, **how), args.link_gbit_s, args.out, console, notes)
            return 0
        args.out = args.out or OUT
        if not args.render:
            _measure(args, notes)
        _report(args.out, console)
    except HackkvError as error:
        notes.print(f"hackkv eval: {error}", style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        notes.print(f"stopped; what was measured is in {args.out}, and the same command goes on from there")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    names = f"rows: {', '.join(v.name for v in variants.VARIANTS)}\ntasks:\n"
    names += "\n".join(f"  {task.name:11} {task.says}" for task in suite.SUITE)
    parser = argparse.ArgumentParser(
        "hackkv eval", description=__doc__, epilog=names, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="folder, GGUF file, hub name or smollm2; default: the shipped model"
    )
    parser.add_argument(
        "--data", type=Path, help='JSONL with {"prompt": ..., "answer": ...} per line; adds task `data`'
    )
    parser.add_argument("--variants", type=_names, default=(), help="rows, separated by commas; default: all")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of `hackkv calibrate`; adds the rows *-calibrated"
    )
    parser.add_argument("--tasks", type=_names, default=(), help="tasks, separated by commas; default: the model's")
    parser.add_argument("--samples", type=_positive, default=0, help="samples per task and point; default: the task's")
    parser.add_argument("--longest", type=_positive, default=0, help="leave out points that need more context")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--out", type=Path, help=f"folder of the files; the report is OUT.md; default: {OUT}")
    parser.add_argument("--again", action="store_true", help="measure rows and tasks that have a current file, too")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--weights", default="auto", help="how matrices rest: auto, fp32, bf16, int8 or int4")
    parser.add_argument("--backend", default="auto", help="kernels; default: the fastest of this machine")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="threads; default: all cores")
    parser.add_argument(
        "--recommend",
        nargs="?",
        const="",
        metavar="MODEL",
        help="only measure what each preset costs this model (default: the shipped one), and recommend one; with --out "
        "the report tells it too",
    )
    parser.add_argument(
        "--link-gbit-s",
        type=_rate,
        default=LINK_GBIT_S,
        help=f"with --recommend: the link between prefill and decode; default: {LINK_GBIT_S:g}",
    )
    parser.add_argument("--render", action="store_true", help="only write the report of the files in OUT")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is no rate")
    return value


def _measure(args: argparse.Namespace, console: Console) -> None:
    records = read_records(args.data) if args.data else ()
    torch.set_num_threads(1)
    config = ModelConfig(path=args.model, dtype=args.dtype, weights=args.weights, threads=1, backend=args.backend)
    subject = load_subject(config, records)
    rows = variants.choose(args.variants, args.calibration, ablations=writes(subject))
    limits = RunLimits(args.samples, args.seed, args.longest)
    tasks = suite.prepared(subject, suite.choose(args.tasks, subject), limits)
    for task, made in tasks.items():
        for line in made.left_out:
            console.print(f"left out: {task.name} {line}", style="yellow", markup=False, soft_wrap=True)
    tasks = {task: made for task, made in tasks.items() if made.tokens}
    if not tasks:
        raise ConfigError("nothing to measure: no task is left")
    missing = run.pending(subject, rows, tasks, args.out, again=args.again)
    _run(subject, missing, tasks, RunOutput(args.out, load(args.backend).name, args.jobs), console)


def _recommend(model: ModelConfig, link_gbit_s: float, out: Path | None, console: Console, notes: Console) -> None:
    found = recommend(model, link_gbit_s, notes)
    show(found, console)
    if out is not None:
        machine = this_machine("", model.threads)
        where = f"{machine.cpu}, {model.threads} threads, {model.dtype}, commit {commit()}, "
        where += f"load average {os.getloadavg()[1]:.1f} (5 min)"
        told = cells.place(out, found.model, "", "").with_name(RECOMMENDED)
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(as_markdown(found, where), encoding="utf-8")


def _run(
    subject: Subject, missing: Sequence[Pending], tasks: Mapping[Task, Prepared], output: RunOutput, console: Console
) -> None:
    """Run everything under a progress bar, which counts tokens."""
    fields = (TextColumn("{task.description:32}"), BarColumn(), TaskProgressColumn())
    with Progress(*fields, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(tasks[task].tokens for row in missing for task in row.tasks))

        def on_tokens(what: str, count: int) -> None:
            progress.update(bar, advance=count, description=what)
            if not console.is_terminal:  # a log shows no progress bar
                console.print(f"{progress.tasks[0].percentage:5.1f} %  {what}")

        run.measure(subject, missing, tasks, output, on_tokens)


def _report(out: Path, console: Console) -> None:
    """Write the report of every model in `out`, those that chat first, and a picture of each."""
    found = sorted(
        (results.read(folder) for folder in cells.models(out)), key=lambda each: (not each.chats, each.model)
    )
    if not found:
        raise ConfigError(f"{out}: no file of `hackkv eval`")
    pictures, told, tried = dict[str, str](), dict[str, str](), dict[str, str]()
    for each, folder in ((each, cells.place(out, each.model, "", "").parent) for each in found):
        for name, texts in ((RECOMMENDED, told), (TRIED, tried)):
            if (text := folder / name).is_file():
                texts[each.model] = text.read_text(encoding="utf-8")
        for table in terminal_tables(each, console.width):
            console.print(table)
        picture = folder / "accuracy.png"
        if draw(each, picture):
            pictures[each.model] = picture.relative_to(out.parent).as_posix()
    report = out.with_suffix(".md")
    report.write_text(markdown(found, pictures, told, tried), encoding="utf-8")
    console.print(f"wrote {report}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
