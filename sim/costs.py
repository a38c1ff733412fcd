"""Durations of work: by roofline, from a measured grid, or as recorded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from hackkv.config import Frozen, load
from hackkv.errors import ConfigError
from sim.catalogue import FP16_BYTES, Gpu, ModelShape
from sim.sizes import CodecSizes
from sim.spec import Efficiency

Floats = npt.NDArray[np.float64]

FARTHEST: Final = 2.0
"""A profile is continued up to this multiple of its last point."""
_CORRECTIONS: Final = 3
"""Row products per page that correct a product of codes (HACK, eq. 4)."""


class PassCost(NamedTuple):
    """A prefill pass, in seconds."""

    seconds: float
    quantize_s: float = 0.0
    """The part of `seconds` that quantizes."""


class StepCost(Protocol):
    """Decode steps of one batch. `context` is the sum of all rows before the first of the steps; each step adds one row
    to every sequence."""

    def seconds(self, context: int, steps: int) -> float:
        """Duration of `steps` steps, in seconds."""
        ...

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """Seconds of these steps in attention, and the part of them in corrections or dequantizing."""
        ...


class CostModel(Protocol):
    """Durations on one replica."""

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """A pass over chunks (first row, rows)."""
        ...

    def decode(self, batch: int) -> StepCost:
        """Steps of `batch` sequences."""
        ...

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of the replayed rows of a decode step."""
        ...

    def swap(self, num_bytes: int) -> float:
        """A copy to host memory or back."""
        ...


def whole_steps(cost: StepCost, context: int, most: int, most_s: float, elapsed_s: float) -> int:
    """The number of the step, counted from 1, during which `elapsed_s` falls. All `most` steps take `most_s`."""
    low, high = 1, most
    # Steps take nearly the same time, so the guess is rarely off by more than one.
    guess = math.ceil(elapsed_s / most_s * most) if elapsed_s > 0 else 1
    for middle in (guess, guess - 1):
        if low <= middle < high:
            low, high = (low, middle) if cost.seconds(context, middle) >= elapsed_s else (middle + 1, high)
    while low < high:
        middle = (low + high) // 2
        if cost.seconds(context, middle) >= elapsed_s:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A step that takes `fixed_s`, and `row_s` more for each row of context."""

    batch: int
    fixed_s: float
    row_s: float
    approximation_row_s: float = 0.0
    """The part of `row_s` in corrections or dequantizing."""

    def rows(self, context: int, steps: int) -> float:
        """Rows read by all steps: the sum of context + batch * i for i in 0 .. steps - 1."""
        return steps * context + self.batch * (steps * (steps - 1) / 2)

    def seconds(self, context: int, steps: int) -> float:
        """See `StepCost`."""
        rows = steps * context + self.batch * (steps * (steps - 1) / 2)  # `rows` inlined: this sum is the hot one
        return steps * self.fixed_s + self.row_s * rows

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """See `StepCost`."""
        rows = self.rows(context, steps)
        return self.row_s * rows, self.approximation_row_s * rows


class Roofline:
    """Durations from rated speeds and the share of them that an engine reaches (HACK's hardware: `sim/catalogue.yaml`).

    Prefill computes 2 FLOPs per parameter and token, and attention over all earlier rows. Decode reads all weights once
    per step, and the KV of every sequence in its stored form. Two all-reduces per layer cross the bus. `pp` stages work
    on different chunks at once, so a pass counts for 1 / `pp` of its time.
    """

    def __init__(
        self, model: ModelShape, gpu: Gpu, efficiency: Efficiency, codec: CodecSizes, tp: int, pp: int
    ) -> None:
        self._pp = pp
        self._efficiency = efficiency
        flops = tp * gpu.fp16_tflops * 1e12 * efficiency.compute
        self._token_s = 2 * model.parameters / flops
        integer = 2.0 if codec.reads_codes and gpu.int8_tops else 1.0
        self._pair_s = efficiency.attention * model.attention_flops / integer / flops
        ring = 2 * (tp - 1) / tp * model.hidden * FP16_BYTES
        self._collective_s = 2 * model.layers * ring / (gpu.bus_gb_s * 1e9 * efficiency.bus)
        """All-reduce seconds of one token."""
        self._latency_s = 2 * model.layers * efficiency.all_reduce_s * (tp > 1)
        memory = tp * gpu.memory_gb_s * 1e9 * efficiency.memory
        self._weights_s = model.total_weight_bytes / memory
        ratio = codec.resting_ratio
        self._quantize_s = 0.0 if codec.lossless else model.kv_bytes * (1 + ratio) / memory / pp
        read_s = model.kv_bytes * ratio / memory
        if codec.dequantizes:
            self._correct_s = 2 * model.kv_bytes / memory
        elif codec.codes:
            self._correct_s = _CORRECTIONS * model.attention_flops / codec.footprint.page_tokens / flops
        else:
            self._correct_s = 0.0
        self._row_s = read_s + self._correct_s
        self._host_b_s = gpu.host_gb_s * 1e9 * tp * pp
        self._steps: dict[int, LinearStep] = {}
        """Batch -> its step."""

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """See `CostModel`."""
        compute_s, tokens = self._compute(chunks)
        quantize_s = tokens * self._quantize_s
        seconds = (compute_s + tokens * self._collective_s + self._latency_s) / self._pp
        return PassCost(self._efficiency.pass_s + seconds + quantize_s, quantize_s)

    def decode(self, batch: int) -> LinearStep:
        """See `CostModel`."""
        step = self._steps.get(batch)
        if step is None:
            work_s = max(self._weights_s, batch * self._token_s) + batch * self._collective_s + self._latency_s
            step = LinearStep(batch, self._efficiency.step_s + work_s, self._row_s, self._correct_s)
            self._steps[batch] = step
        return step

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `CostModel`."""
        return max(self._weights_s, self._compute(chunks)[0])

    def swap(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return num_bytes / self._host_b_s

    def _compute(self, chunks: Sequence[tuple[int, int]]) -> tuple[float, int]:
        """Seconds of computing, without communication between GPUs, and tokens."""
        seconds, tokens = 0.0, 0
        for start, count in chunks:
            seconds += count * (self._token_s + self._pair_s * (start + count / 2))
            tokens += count
        return seconds, tokens


class Grid(Frozen):
    """Seconds at every pair of a row and a column; both series rise."""

    rows: tuple[float, ...] = Field(min_length=2)
    columns: tuple[float, ...] = Field(min_length=2)
    seconds: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _is_grid(self) -> Grid:
        for name, series in (("rows", self.rows), ("columns", self.columns)):
            if any(later <= earlier for earlier, later in pairwise(series)):
                raise ValueError(f"{name} do not rise")
        if len(self.seconds) != len(self.rows) or {len(row) for row in self.seconds} != {len(self.columns)}:
            raise ValueError(f"seconds are not {len(self.rows)} rows of {len(self.columns)}")
        if any(value < 0 for row in self.seconds for value in row):
            raise ValueError("a duration is negative")
        return self

    def at(self, row: float, column: float, what: str) -> float:
        """Seconds at a point, linear between grid points. Below the first point, the first point's value holds. Raises
        `ConfigError` beyond `FARTHEST` times the last point."""
        index = _cell(self.rows, row)
        here = self.rows[index : index + 2], self.seconds[index : index + 2]
        ends = [_line(self.columns, series, column, f"{what}: column") for series in here[1]]
        return max(0.0, _line(here[0], ends, row, f"{what}: row", self.rows[-1]))


def _cell(series: Sequence[float], at: float) -> int:
    return min(max(bisect_right(series, at) - 1, 0), len(series) - 2)


def _line(series: Sequence[float], values: Sequence[float], at: float, what: str, last: float | None = None) -> float:
    last = series[-1] if last is None else last
    if at > FARTHEST * last:
        raise ConfigError(f"profile: {what} {at:g} is more than {FARTHEST:g} times the last measured, {last:g}")
    at = max(at, series[0])
    index = _cell(series, at)
    low, high = series[index], series[index + 1]
    return values[index] + (values[index + 1] - values[index]) * (at - low) / (high - low)


class Profile(Frozen):
    """Durations that a bench measured on one machine with one model and codec."""

    machine: str = ""
    model: str = ""
    codec: str = ""
    prefill: Grid
    """Rows: tokens of a pass. Columns: earlier rows that a token reads, mean."""
    decode: Grid
    """Rows: sequences of a step. Columns: their mean context."""
    quantize_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a pass."""
    attend_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a step."""
    approximation_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a step."""
    host_gb_s: float = Field(default=4.0, gt=0)


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises `ConfigError` naming file and key."""
    return load(Profile, path)


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """Steps of one batch, read off the grid."""

    batch: int
    profile: Profile

    def seconds(self, context: int, steps: int) -> float:
        """See `StepCost`."""
        of = self.profile.decode.at
        return sum(of(self.batch, context / self.batch + step, "decode") for step in range(steps))

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """See `StepCost`."""
        seconds = self.seconds(context, steps)
        return seconds * self.profile.attend_share, seconds * self.profile.approximation_share


class Profiled:
    """Durations from a grid that a bench measured."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """See `CostModel`. Several chunks count as one chunk of all their tokens, with their mean context."""
        seconds = self._pass_s(chunks)
        return PassCost(seconds, seconds * self._profile.quantize_share)

    def decode(self, batch: int) -> ProfiledStep:
        """See `CostModel`."""
        return ProfiledStep(batch, self._profile)

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `CostModel`."""
        return self._pass_s(chunks)

    def swap(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return num_bytes / (self._profile.host_gb_s * 1e9)

    def _pass_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        tokens = sum(count for _, count in chunks)
        start = sum(start * count for start, count in chunks) / tokens
        return self._profile.prefill.at(tokens, start, "prefill")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Steps with measured durations, one after another."""

    steps_s: list[float]

    def seconds(self, context: int, steps: int) -> float:
        """See `StepCost`. Raises `ConfigError` past the end of the record."""
        if steps > len(self.steps_s):
            raise ConfigError(f"record: {steps} decode steps are wanted and {len(self.steps_s)} are left")
        return sum(self.steps_s[:steps])

    def attend_s(self, context: int, steps: int) -> tuple[float, float]:
        """Zeros: a record does not split a step."""
        return 0.0, 0.0


class Recorded:
    """Durations recorded of a live node: each call takes the next one of its kind, whatever is computed. Raises
    `ConfigError` past the end of the record."""

    def __init__(self, passes_s: Sequence[float], steps_s: Sequence[float], swaps_s: Sequence[float] = ()) -> None:
        self._passes_s, self._steps_s, self._swaps_s = list(passes_s), list(steps_s), list(swaps_s)

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> PassCost:
        """See `CostModel`."""
        return PassCost(_next(self._passes_s, "prefill pass"))

    def decode(self, batch: int) -> RecordedStep:
        """See `CostModel`. The caller runs one step at a time."""
        return RecordedStep([_next(self._steps_s, "decode step")])

    def replay(self, chunks: Sequence[tuple[int, int]]) -> float:
        """0: a recorded step includes its replays."""
        return 0.0

    def swap(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return _next(self._swaps_s, "swap")


def _next(durations: list[float], what: str) -> float:
    if not durations:
        raise ConfigError(f"record: no {what} is left")
    return durations.pop(0)
