"""What a task is: a row of `suite.SUITE`. A module beside this one makes it; nothing else knows a task by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hackkv.model.worker import Worker
from measure.accuracy.cells import Found
from measure.accuracy.metrics import Measure
from measure.accuracy.subject import Subject
from measure.tasks import Ids

Advance = Callable[[int], None]
"""Called with the number of tokens that a worker just read or wrote. Raises if the run is to stop."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """How much a run may ask for."""

    samples: int = 0
    """Per task and point; 0 takes each task's own number."""
    seed: int = 0
    longest: int = 0
    """Points that need more tokens of context are left out; 0 takes the model's context."""

    def context(self, subject: Subject) -> int:
        """The most tokens of a prompt and its answer."""
        most = subject.worker.model.spec.max_context
        return min(self.longest or most, most)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task with its material for one model. All rows answer the same material, so this is made once."""

    tokens: int
    """About as many as a worker reads and writes."""
    samples: str
    """How many, in words."""
    digest: str
    """Of all material: other material is another measurement."""
    points: tuple[int, ...]
    """Distances or context lengths in tokens, which `measure` answers in this order."""
    measure: Callable[[Worker, Advance, Collection[int]], Iterable[tuple[int, Found]]]
    """What a row answers, point by point, but for the given points.

    Called by several threads at once.
    """
    left_out: list[str] = field(default_factory=list)
    """A line for each point that does not fit the model's context."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question."""

    name: str
    says: str
    version: int
    """Grows with every change of how answers are made or scored."""
    measures: tuple[Measure, ...]
    """In the order of the report; the first is the main one."""
    prepare: Callable[[Subject, RunLimits], Prepared]
    """Raises `ValueError` if the held-out text or the model cannot give the material."""
    suits: Callable[[Subject], bool]
    """Whether the task is asked when none is named."""


def left(points: Iterable[int], done: Collection[int]) -> list[int]:
    """The points that are not done, in order."""
    return [point for point in points if point not in done]


def digest_of(parts: Iterable[Ids | str]) -> str:
    """SHA-256 of token ids and texts, in hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part.astype("<i8").tobytes()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def chats(subject: Subject) -> bool:
    """A model that was taught to answer: it has a chat template."""
    return subject.tokenizer.has_chat_template


def writes(subject: Subject) -> bool:
    """A model that only continues text."""
    return not chats(subject)


def anyone(subject: Subject) -> bool:
    """Every model."""
    return True


def on_request(subject: Subject) -> bool:
    """No model: the task is asked where it is named, or where its data are given."""
    return False
