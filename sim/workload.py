"""Requests of a simulation: traces of three kinds, and synthetic ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from hackkv.errors import ConfigError
from measure.serve.arrivals import arrival_times
from measure.serve.shapes import SHAPES, Shape, fixed
from sim.catalogue import named
from sim.jobs import Arrival
from sim.spec import Load

_LONGEST = 1 << 24
MOONCAKE_BLOCK = 512
"""Tokens of a block of Mooncake's traces."""


class TraceLine(BaseModel):
    """A line of a JSONL trace: Mooncake's, AIPerf's, or our own. Other keys are ignored. `timestamp` is in milliseconds
    from the start; `at_s`, our own, in seconds."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    input_length: int = Field(
        ge=1, le=_LONGEST, validation_alias=AliasChoices("input_length", "prompt_tokens", "input_tokens")
    )
    output_length: int = Field(ge=1, le=_LONGEST, validation_alias=AliasChoices("output_length", "output_tokens"))
    max_tokens: int = Field(default=0, ge=0, le=_LONGEST)
    timestamp: float | None = Field(default=None, ge=0)
    at_s: float | None = Field(default=None, ge=0)
    hash_ids: tuple[int, ...] = ()

    def arrival(self) -> Arrival:
        """The request as the simulator takes it."""
        at_s = self.at_s if self.at_s is not None else (self.timestamp or 0.0) / 1e3
        most = self.max_tokens if self.max_tokens >= self.output_length else 0
        return Arrival(at_s, self.input_length, self.output_length, most, self.hash_ids, MOONCAKE_BLOCK)


def read_trace(path: Path) -> list[Arrival]:
    """Every request of a file, by arrival: `.csv` as Azure and Splitwise write it, anything else as JSONL.

    Raises `ConfigError` naming file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path}: {error}") from error
    arrivals = _from_csv(path, text) if path.suffix == ".csv" else list(_from_jsonl(path, text))
    if not arrivals:
        raise ConfigError(f"--trace: {path}: no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _from_jsonl(path: Path, text: str) -> Iterator[Arrival]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield TraceLine.model_validate_json(line).arrival()
            except ValidationError as error:
                raise _at(path, number, error) from error


_COLUMNS = {
    "input_length": ("ContextTokens", "prompt_size", "input_length"),
    "output_length": ("GeneratedTokens", "token_size", "output_length"),
}
_TIMES = ("TIMESTAMP", "arrival_timestamp", "at_s")


def _from_csv(path: Path, text: str) -> list[Arrival]:
    """Rows in any order. Time 0 is the earliest row's."""
    rows = csv.DictReader(text.splitlines())
    known = rows.fieldnames or []
    columns = {field: _column(path, names, known) for field, names in _COLUMNS.items()}
    time = _column(path, _TIMES, known)
    arrivals = list[Arrival]()
    for number, row in enumerate(rows, 2):
        at_s = _seconds(path, number, row[time])
        try:
            line = TraceLine.model_validate({field: row[column] for field, column in columns.items()})
        except ValidationError as error:
            raise _at(path, number, error) from error
        arrivals.append(Arrival(at_s, line.input_length, line.output_length))
    start = min((arrival.at_s for arrival in arrivals), default=0.0)
    return [arrival._replace(at_s=arrival.at_s - start) for arrival in arrivals]


def _column(path: Path, names: Sequence[str], known: Sequence[str]) -> str:
    for name in names:
        if name in known:
            return name
    raise ConfigError(f"--trace: {path}: no column {' or '.join(names)}; found {', '.join(known) or 'none'}")


def _seconds(path: Path, number: int, text: str | None) -> float:
    """Seconds from a number, or from a date and time. Azure writes seven digits of a second; Python reads six."""
    text = (text or "").strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        whole, _, fraction = text.partition(".")
        digits = fraction[: next((i for i, c in enumerate(fraction) if not c.isdigit()), len(fraction))]
        rest = fraction[len(digits) :]
        return datetime.fromisoformat(f"{whole}.{digits[:6]:0<6}{rest}").timestamp()
    except ValueError as error:
        raise ConfigError(f"--trace: {path}:{number}: {text!r} is neither a time nor a number of seconds") from error


def _at(path: Path, number: int, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return ConfigError(f"--trace: {path}:{number}: {f'{field}: ' if field else ''}{first['msg']}")


def shape_of(load: Load) -> Shape:
    """The lengths of synthetic requests. Raises `ConfigError` for an unknown data set."""
    if load.input_len:
        return fixed(load.input_len, load.output_len)
    return named(SHAPES, load.shape, "load.shape")


def synthetic(load: Load, seed: int) -> list[Arrival]:
    """Requests as `load` says. Arrivals have a generator of their own, so another rate leaves the lengths unchanged."""
    arrival_rng, rng = (np.random.default_rng((seed, stream)) for stream in range(2))
    shape = shape_of(load)
    prompts, outputs = shape.prompt.draw(load.requests, rng), shape.output.draw(load.requests, rng)
    times = arrival_times(load.requests, 1.0, load.burstiness, arrival_rng)
    return [
        Arrival(at_s, prompt, output)
        for at_s, prompt, output in zip(_ramped(times, load), prompts, outputs, strict=True)
    ]


def _ramped(times: Sequence[float], load: Load) -> list[float]:
    """Arrival times at the load's rate, which may change linearly, from `times` of a process of rate 1."""
    end = load.ramp_to or load.rate
    if not times or end == load.rate:
        return [at_s / load.rate for at_s in times]
    total = 2 * times[-1] / (load.rate + end)
    slope = (end - load.rate) / total if total else 0.0
    return [(np.sqrt(load.rate**2 + 2 * slope * at_s) - load.rate) / slope if slope else 0.0 for at_s in times]


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write requests as our own JSONL."""
    lines = (
        json.dumps({"at_s": each.at_s, "input_length": each.prompt_tokens, "output_length": each.output_tokens})
        for each in arrivals
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
