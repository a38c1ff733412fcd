"""Measures every row on every task that has no current file, several rows at a time on one compute thread each.

Small models spend their time between operations, not in them. So jobs side by side keep the cores busier than threads
inside an operation would. Results do not depend on this: each job has a codec of its own, and in FP32 the model's rows
do not depend on their neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Final

from hackkv.codec import rows_held
from hackkv.codec_footprint import footprint_of, fp16_bytes
from hackkv.errors import ConfigError
from hackkv.model.worker import SHARE_TOKENS, Unloaded
from hackkv.types import WIRE_FORM
from measure.accuracy import cells
from measure.accuracy.cells import Cell, Key, TaskNote, VariantRow
from measure.accuracy.engine import CHUNK_TOKENS
from measure.accuracy.machine import commit, this_machine
from measure.accuracy.subject import Subject
from measure.accuracy.task import Prepared, Task
from measure.accuracy.variants import Variant

MATERIAL: Final = "material"
"""The field of a key that identifies the material of a task."""
OnTokens = Callable[[str, int], None]
"""Called from any thread with a label of the measurement and the number of tokens that were just done."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A row, and the tasks for which it has no current file."""

    variant: Variant
    planned: Unloaded
    tasks: dict[Task, tuple[Key, Cell | None]]
    """Task -> (key of its file, the file with its first points if a run was stopped amid them)."""


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The folder of the files, and notes about the run that makes them."""

    folder: Path
    backend: str
    jobs: int


class Stopped(Exception):
    """Raised in a job when the run is over; its unfinished point is dropped."""


def pending(
    subject: Subject, rows: Sequence[Variant], tasks: Mapping[Task, Prepared], folder: Path, *, again: bool
) -> list[Pending]:
    """The rows and tasks that are left to measure; all of them if `again`. Loads no weights.

    Raises `ConfigError` naming a file that would lose points, unless `again`.
    """
    found = list[Pending]()
    for row in rows:
        planned = subject.plan(row.codec)
        keys = {task: _key(task, made, planned) for task, made in tasks.items()}
        begun = dict[Task, Cell | None]()
        for task, key in keys.items():
            path = cells.place(folder, subject.worker.name, row.name, task.name)
            if not again:
                _check_points(path, key, tasks[task].points)
            begun[task] = None if again else cells.current(path, key)
        missing = {task: (keys[task], cell) for task, cell in begun.items() if cell is None or not cell.complete}
        if missing:
            found.append(Pending(row, planned, missing))
    return found


def _check_points(path: Path, key: Key, points: Sequence[int]) -> None:
    """Raise `ConfigError` if the run would drop points from the file that the task still has, as `--longest` does.

    A file that is no longer current counts too: all other rows are compared with the file of exact KV.
    """
    there = cells.read(path)
    if there is None or there.key.get("task") != key["task"]:
        return
    if gone := sorted(there.points.keys() - set(points)):
        raise ConfigError(
            f"{path}: was measured at {', '.join(map(str, gone))}, too, which this run leaves out; without --longest "
            "it keeps them, --out takes another folder, and with --again it is measured anew"
        )


def _key(task: Task, made: Prepared, planned: Unloaded) -> Key:
    return {
        "task": f"{task.name} {task.version}",
        MATERIAL: made.digest,
        "chunk_tokens": str(CHUNK_TOKENS),
        "kernels": planned.kernels,
        **{name: value for name, value in planned.fingerprint().fields if name != WIRE_FORM},
    }


def measure(
    subject: Subject, rows: Iterable[Pending], tasks: Mapping[Task, Prepared], output: RunOutput, on_tokens: OnTokens
) -> None:
    """Write a file for each pending row and task, point by point. Raises what the forward pass raises.

    After an exception, Ctrl-C among them, jobs stop at their next batch; points that were written stay.
    """
    stop, code = threading.Event(), commit()

    def one(row: Pending) -> None:
        worker = None
        for task, (key, begun) in row.tasks.items():
            label, began, clock = f"{task.name}: {row.variant.name}", datetime.now(UTC), perf_counter()

            def advance(tokens: int, label: str = label) -> None:
                if stop.is_set():
                    raise Stopped
                on_tokens(label, tokens)

            advance(0)
            worker = worker or subject.load(row.planned)
            cell = Cell(
                key=key,
                model=subject.worker.name,
                held_out=subject.source,
                row=row_of(row.variant, row.planned),
                task=TaskNote(task.name, task.says, tasks[task].samples, tasks[task].left_out),
                points=begun.points if begun else {},
                machine=this_machine(output.backend, output.jobs),
                commit=code,
                began=began.isoformat(timespec="seconds"),
                seconds=begun.seconds if begun else 0.0,
                complete=False,
            )
            path = cells.place(output.folder, subject.worker.name, row.variant.name, task.name)
            for point, found in tasks[task].measure(worker, advance, cell.points.keys()):
                cell.points[point] = found
                cells.write(path, replace(cell, seconds=round(cell.seconds + perf_counter() - clock, 1)))
            seconds = round(cell.seconds + perf_counter() - clock, 1)
            cells.write(path, replace(cell, seconds=seconds, complete=True))

    with ThreadPoolExecutor(output.jobs) as pool:
        try:
            for future in [pool.submit(one, row) for row in rows]:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def row_of(variant: Variant, planned: Unloaded) -> VariantRow:
    """The table's row of a variant, with the bytes of its pages."""
    layout = planned.spec.kv_layout(planned.codec.page_tokens)
    sizes = footprint_of(planned.codec, layout)
    rows = rows_held(planned.codec, SHARE_TOKENS)
    return VariantRow(
        variant.name,
        variant.says,
        variant.family,
        variant.codec.name,
        {name: value for name, value in variant.codec.settings.items() if name != "calibration"},
        sizes.resting_bytes(rows) / SHARE_TOKENS,
        sizes.wire_bytes(rows) / SHARE_TOKENS,
        fp16_bytes(layout, 1),
    )
