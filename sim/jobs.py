"""A request on its way through a simulated cluster, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from hackkv.page_names import PageName
from hackkv.timing import Stage


class Fate(Enum):
    """How a job stands."""

    UNDER_WAY = auto()
    DONE = auto()
    FAILED = auto()


class Arrival(NamedTuple):
    """One request of a trace. There are millions of them, which travel to other processes."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    """What it asks for; 0 is exactly what it gets."""
    blocks: tuple[int, ...] = ()
    """Names of the blocks of its prompt, as in Mooncake's traces: equal prefixes have equal names."""
    block_tokens: int = 512
    """Tokens of a block."""


_NOTHING = dict.fromkeys(Stage, 0.0)


class StageTimes:
    """Splits a job's life into stages; they sum to its length, since each moment belongs to one of them."""

    __slots__ = ("at", "marks", "spent", "stage")

    def __init__(self, now: float, *, keep_marks: bool = False) -> None:
        """`keep_marks` keeps every change of stage, for a trace."""
        self.stage, self.at = Stage.ROUTER_QUEUE, now
        self.spent = _NOTHING.copy()
        """Seconds of each stage, in their order."""
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
    """What is reported beside the stages: seconds of sub-stages, and counts."""

    quantize_s: float = 0.0
    attend_s: float = 0.0
    approximation_s: float = 0.0
    cached_tokens: int = 0
    """Of the prompt, found in the prefill replica's memory."""
    swaps: int = 0
    failovers: int = 0
    wire_bytes: int = 0
    """KV that was sent, repeats included."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. Times in seconds of the simulation."""

    number: int
    arrival: Arrival
    arrived: float
    times: StageTimes
    rows: int
    """Of its prompt, that stay once it is computed."""
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
        """The most tokens that it may get."""
        return self.arrival.max_tokens or self.arrival.output_tokens

    @property
    def emitted(self) -> int:
        """Tokens that the client has."""
        return self.arrival.output_tokens - self.left
