"""Measurements, one small file for each model, row and task: FOLDER/MODEL/ROW/TASK.json.

A file carries the key of everything that its numbers depend on. While the key holds, nothing is measured again. So a
run that was stopped continues where it stopped, a codec that changed is measured alone, and files of several machines
or branches lie side by side. A file is written whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hackkv.errors import ConfigError
from measure.accuracy.machine import Machine
from measure.accuracy.metrics import Measure
from measure.accuracy.variants import Setting

Key = dict[str, str]
"""Everything that the numbers of a file depend on: task and material, model, kernels, codec."""


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One variant and the bytes of its pages, over all layers and KV heads."""

    name: str
    says: str
    family: str
    codec: str
    settings: dict[str, Setting]
    bytes_per_token: float
    """Bytes per token of a sequence of `SHARE_TOKENS` tokens at rest, exact pages included."""
    wire_bytes_per_token: float
    exact_bytes_per_token: float
    """Bytes per token of the same rows in FP16."""

    @property
    def share(self) -> float:
        """Bytes as a share of FP16's."""
        return self.bytes_per_token / self.exact_bytes_per_token


@dataclass(frozen=True, slots=True)
class Found:
    """One row's answers to a task at one point."""

    scores: dict[Measure, list[float]]
    """Measure -> score of each sample, in the same order for all rows."""
    ids: list[list[int]] = field(default_factory=list)
    """Tokens of free answers, to compare them with exact KV's."""
    texts: list[str] = field(default_factory=list)
    """Free answers as text, to compare them with exact KV's."""


@dataclass(frozen=True, slots=True)
class TaskNote:
    """The description of a task, for the report."""

    name: str
    says: str
    samples: str
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Cell:
    """The content of one file."""

    key: Key
    model: str
    held_out: str
    row: VariantRow
    task: TaskNote
    points: dict[int, Found]
    machine: Machine
    commit: str
    began: str
    seconds: float
    complete: bool = True
    """Whether the file has every point that was asked."""


_CELL = TypeAdapter(Cell)


def place(folder: Path, model: str, row: str, task: str) -> Path:
    """The file of a task and row."""
    return folder / model.replace("/", "--") / row / f"{task}.json"


def read(path: Path) -> Cell | None:
    """The content of a file; None if the file is missing or not ours."""
    try:
        return _CELL.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def current(path: Path, key: Key) -> Cell | None:
    """The measurement under `key`, complete or with its first points only; None if there is none."""
    cell = read(path)
    return cell if cell is not None and cell.key == key else None


def write(path: Path, cell: Cell) -> None:
    """Write the file whole or not at all. Raises `ConfigError` naming the file."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_CELL.dump_json(cell) + b"\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def models(folder: Path) -> list[Path]:
    """The folders of models in `folder` that hold a file."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and any(path.glob("*/*.json")))


def cells(model: Path) -> Iterator[Cell]:
    """Every file of one model. Raises `ConfigError` naming a file that is not ours."""
    for path in sorted(model.glob("*/*.json")):
        try:
            yield _CELL.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path}: not a file of `hackkv eval`: {str(error).splitlines()[0]}") from error
