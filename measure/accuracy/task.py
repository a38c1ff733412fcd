"""The definition of a task: a row of `suite.SUITE`, made by a module of this folder. No other code names tasks."""

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
    """Limits on the samples and the context of a run."""

    samples: int = 0
    """Samples per task and point; 0 takes each task's own number."""
    seed: int = 0
    longest: int = 0
    """Points that need more tokens of context are left out; 0 takes the model's context."""

    def context(self, subject: Subject) -> int:
        """The most tokens of a prompt and its answer."""
        most = subject.worker.model.spec.max_context
        return min(self.longest or most, most)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task with its material for one model. All rows answer the same material, so it is made once."""

    tokens: int
    """Approximate number of tokens that a worker reads and writes."""
    samples: str
    """Number of samples, in words."""
    digest: str
    """Digest of all material: other material is another measurement."""
    points: tuple[int, ...]
    """Distances or context lengths in tokens, which `measure` answers in this order."""
    measure: Callable[[Worker, Advance, Collection[int]], Iterable[tuple[int, Found]]]
    """Yields (point, a row's answers) for each point that is not among the given ones, which are done.

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
    """Increases with every change of how answers are made or scored."""
    measures: tuple[Measure, ...]
    """The measures in the order of the report; the first is the main one."""
    prepare: Callable[[Subject, RunLimits], Prepared]
    """Makes the material. Raises `ValueError` if the held-out text or the model cannot give it."""
    suits: Callable[[Subject], bool]
    """Whether the task is asked of this model when no task is named."""


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
    """Whether the model was taught to answer: it has a chat template."""
    return subject.tokenizer.has_chat_template


def writes(subject: Subject) -> bool:
    """Whether the model only continues text."""
    return not chats(subject)


def anyone(subject: Subject) -> bool:
    """True: the task suits every model."""
    return True


def on_request(subject: Subject) -> bool:
    """False: the task is asked only if it is named, or if its data are given."""
    return False
