"""The outcome of every request of a simulation: one row of numbers each."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

import sim.decode
import sim.prefill
from hackkv.timing import Stage, SubStage
from sim.eventlog import BusySpan, EventKind
from sim.jobs import Fate, Job
from sim.spec import Spec

Floats = npt.NDArray[np.float64]

SUB_STAGES: Final = (SubStage.QUANTIZE, SubStage.ATTEND, SubStage.APPROXIMATION)
STAGES: Final = tuple(Stage)
COLUMNS: Final = (
    "at_s",
    "input_length",
    "output_length",
    "ttft_s",
    "tpot_s",
    "e2el_s",
    *(f"{stage}_s" for stage in STAGES),
    *(f"{stage}_s" for stage in SUB_STAGES),
    "cached_tokens",
    "swaps",
    "failovers",
    "wire_bytes",
    "ok",
)
"""Columns of a row. `ttft_s` is from arrival to token 0, `e2el_s` (JCT) from arrival to the last token. `tpot_s` is
(JCT - TTFT) / (tokens - 1), and NaN if there is only one token."""


class RequestTable:
    """A growing table of finished requests, in the order of their numbers."""

    def __init__(self, numbers: range) -> None:
        """`numbers` are those of all requests that may be added."""
        self._numbers = numbers
        self._table: Floats = np.full((len(numbers), len(COLUMNS)), np.nan)
        self._fresh, self._fresh_places = array("d"), array("q")
        """Rows that are not in the table yet, and their places. Adding many at once is faster."""
        self._place = {name: index for index, name in enumerate(COLUMNS)}
        self.errors: dict[int, str] = {}
        self.filled = 0

    def add(self, job: Job) -> None:
        """Add the row of a job that is over."""
        account, prompt, tokens = job.account, job.arrival.prompt_tokens, job.arrival.output_tokens
        jct_s = job.ended_at - job.arrived
        ttft_s = jct_s if job.first_at is None else job.first_at - job.arrived
        self._fresh_places.append(self._numbers.index(job.number))
        self._fresh.extend(
            (
                job.arrived,
                prompt,
                tokens,
                ttft_s,
                (jct_s - ttft_s) / (tokens - 1) if tokens > 1 else math.nan,
                jct_s,
                *job.times.spent.values(),
                account.quantize_s,
                account.attend_s,
                account.approximation_s,
                account.cached_tokens,
                account.swaps,
                account.failovers,
                account.wire_bytes,
                job.fate is Fate.DONE,
            )
        )
        self.filled += 1
        if job.error:
            self.errors[job.number] = job.error

    def take(self, part: RequestTable) -> None:
        """Copy the rows of a table that holds a part of the requests."""
        first, step = (self._numbers.index(part._numbers[0]), part._numbers.step) if len(part._numbers) else (0, 1)
        self.table[first::step][: len(part._numbers)] = part.table
        self.errors |= part.errors
        self.filled += part.filled

    def __getitem__(self, column: str) -> Floats:
        """A column over all requests; NaN for a request that never ended."""
        return self.table[:, self._place[column]]

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Which requests were served."""
        return np.equal(self["ok"], 1.0)

    @property
    def table(self) -> Floats:
        """All rows: float64 [requests, columns]."""
        if self._fresh:
            self._table[self._fresh_places] = np.frombuffer(self._fresh).reshape(-1, len(COLUMNS))
            self._fresh, self._fresh_places = array("d"), array("q")
        return self._table


@dataclass(slots=True, eq=False)
class SimulationRecord:
    """The numbers of a simulation."""

    spec: Spec
    rows: RequestTable
    events: str
    """Digest of all events; equal runs have equal digests."""
    counts: Counter[EventKind]
    """Events by kind."""
    prefills: list[sim.prefill.PrefillTally]
    decodes: list[sim.decode.DecodeTally]
    links_s: list[float]
    """Seconds that each link would take for its bytes at full rate."""
    paid_s: dict[str, float]
    """Pool, by its key in the specification -> seconds of its replicas that ran; only for pools that scale."""
    spans: list[BusySpan] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
