"""A request on its way through a simulated cluster, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from hackkv.page_names import PageName
from hackkv.timing import Stage


class Fate(Enum):
    """The outcome of a job so far."""

    UNDER_WAY = auto()
    DONE = auto()
    FAILED = auto()


class Arrival(NamedTuple):
    """One request of a trace. A trace has millions, which travel to other processes, so this is a tuple."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    """The tokens that the request asks for; 0 means exactly `output_tokens`."""
    blocks: tuple[int, ...] = ()
    """Names of the blocks of the prompt, as in Mooncake's traces: equal prefixes have equal names."""
    block_tokens: int = 512
    """Tokens of a block."""


_NOTHING = dict.fromkeys(Stage, 0.0)


class StageTimes:
    """Splits a job's life into stages. They sum to its length, since each moment belongs to exactly one of them."""

    __slots__ = ("at", "marks", "spent", "stage")

    def __init__(self, now: float, *, keep_marks: bool = False) -> None:
        """`keep_marks` keeps every change of stage, for a trace."""
        self.stage, self.at = Stage.ROUTER_QUEUE, now
        self.spent = _NOTHING.copy()
        """Stage -> seconds, in the order of `Stage`."""
        self.marks: list[tuple[Stage, float, float]] | None = [] if keep_marks else None

    def enter(self, stage: Stage, now: float) -> None:
        """End the present stage and begin another."""
        over = self.stage
        if stage is over:
            return
        self.spent[over] = self.spent[over] + now - self.at
        if self.marks is not None and now > self.at:
            self.marks.append((over, self.at, now))
        self.stage, self.at = stage, now


@dataclass(slots=True, eq=False)
class Account:
    """Values that are reported beside the stages: seconds of sub-stages, and counts."""

    quantize_s: float = 0.0
    attend_s: float = 0.0
    approximation_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefill replica's memory."""
    swaps: int = 0
    failovers: int = 0
    wire_bytes: int = 0
    """Bytes of KV that were sent, repeats included."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. Times are seconds of the simulation."""

    number: int
    arrival: Arrival
    arrived: float
    times: StageTimes
    rows: int
    """Rows of its prompt that stay once the prompt is computed."""
    left: int
    """Tokens that the client does not have yet."""
    names: Sequence[PageName] = ()
    first_at: float | None = None
    """When the client had token 0."""
    ended_at: float = 0.0
    account: Account = field(default_factory=Account)
    fate: Fate = Fate.UNDER_WAY
    error: str = ""

    @property
    def max_tokens(self) -> int:
        """The most tokens that the job may get."""
        return self.arrival.max_tokens or self.arrival.output_tokens

    @property
    def emitted(self) -> int:
        """Tokens that the client has."""
        return self.arrival.output_tokens - self.left
