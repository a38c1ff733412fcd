"""The columns of the table: tasks, where each is asked, and how it is scored.

A task gives prompts with one right answer each, as a pure function of the seed. It also says how answers are computed
(`run`) and scored (`measures`). All rows of the table answer the same samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hackkv.errors import ConfigError
from measure import tasks
from measure.accuracy import engine
from measure.accuracy.metrics import TAIL, Measure
from measure.accuracy.subject import Subject
from measure.tasks import Example, join

COPY_SEGMENT, COPY_CUE = 40, 8
FREE_TOKENS = 48
RESTATE_WORDS, RESTATE_CUE = 48, 8
TRIES = 1000
EVERY_RECORD = sys.maxsize

Make = Callable[[Subject, int, int, int], Example]
"""(subject, seed, point, index of the sample) -> prompt and answer. Raises `ValueError` if it cannot be built."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question."""

    name: str
    says: str
    run: engine.Run
    make: Make
    measures: tuple[Measure, ...]
    points: tuple[int, ...]
    """Distances or context lengths, in tokens."""
    samples: int

    @property
    def is_free(self) -> bool:
        """Whether the model's own tokens are fed back, so that runs can diverge."""
        return self.run is engine.greedy


@dataclass(frozen=True, slots=True)
class Column:
    """A task at one point, with its samples."""

    task: Task
    point: int
    examples: tuple[Example, ...]


def _window(subject: Subject, seed: int, point: int, index: int) -> Example:
    window = tasks.cut(np.random.default_rng(seed + index), subject.filler, point)
    return Example(window[:1], window[1:])


def _window_tail(subject: Subject, seed: int, point: int, index: int) -> Example:
    window = tasks.cut(np.random.default_rng(seed + index), subject.filler, point)
    return Example(window[:-TAIL], window[-TAIL:])


def _copy(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.copy(seed + index, subject.phrases, subject.filler, point, COPY_SEGMENT, COPY_CUE)


def _recall(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.recall(seed + index, subject.phrases, subject.filler, point)


def _needle(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.needle(seed + index, subject.phrases, subject.filler, point)


def _code(subject: Subject, seed: int, point: int, index: int) -> Example:
    """`point` tokens of a held-out Python file up to the end of a line, and what follows."""
    rng = np.random.default_rng(seed + index)
    texts = [document.text for document in subject.documents if document.is_code]
    sizes = np.array([len(text) for text in texts], np.float64)
    for _ in range(TRIES if texts else 0):
        text = texts[rng.choice(len(texts), p=sizes / sizes.sum())]
        at = text.find("\n", int(rng.integers(len(text)))) + 1
        prompt, answer = subject.encode(text[:at]), subject.encode(text[at : at + FREE_TOKENS * 16])
        if len(prompt) >= point and len(answer) >= FREE_TOKENS:
            return Example(prompt[-point:], answer[:FREE_TOKENS])
    raise ValueError("no held-out Python file is long enough")


def _restate(subject: Subject, seed: int, point: int, index: int) -> Example:
    """Words at the head of real text, and after the text the first of them again. The other words are the answer.

    Real sentences in place of the words were tried. A small model leaves them at once for a likelier sentence.
    """
    rng = np.random.default_rng(seed + index)
    words = tasks.random_words(rng, subject.phrases, RESTATE_WORDS)
    cue, answer = words[:RESTATE_CUE], words[RESTATE_CUE:]
    text = tasks.cut(rng, subject.filler, point - len(words) - len(cue) - len(answer))
    return Example(join(words, text, cue), answer)


def _data(subject: Subject, seed: int, point: int, index: int) -> Example:
    record = subject.records[index]
    return Example(subject.encode(record.prompt), subject.encode(record.answer))


_REACH = (1024, 2048, 4096)

SUITE: Final = (
    Task(
        "perplexity",
        "held-out text, teacher-forced through prefill",
        engine.forced_prefill,
        _window,
        (Measure.PERPLEXITY, Measure.TAIL),
        (1024,),
        16,
    ),
    Task(
        "decode",
        f"the last {TAIL} tokens of the same windows, one decode step each",
        engine.forced_decode,
        _window_tail,
        (Measure.PERPLEXITY,),
        (1024,),
        16,
    ),
    Task(
        "copy",
        f"{COPY_SEGMENT - COPY_CUE} random tokens again, by distance; decode steps",
        engine.forced_decode,
        _copy,
        (Measure.TOKENS,),
        (128, 512, 1024, 2048),
        12,
    ),
    Task(
        "recall",
        "one key-value pair of many, by context length; decode steps",
        engine.forced_decode,
        _recall,
        (Measure.WHOLE, Measure.TOKENS),
        _REACH,
        8,
    ),
    Task(
        "needle",
        "one fact inside real text, by context length; decode steps",
        engine.forced_decode,
        _needle,
        (Measure.WHOLE, Measure.TOKENS),
        _REACH,
        6,
    ),
    Task(
        "code",
        f"{FREE_TOKENS} greedy tokens after held-out Python",
        engine.greedy,
        _code,
        (Measure.EDIT,),
        (512,),
        24,
    ),
    Task(
        "restate",
        f"summary-like: {RESTATE_WORDS} words at the head of real text, restated greedily from the first {RESTATE_CUE}",
        engine.greedy,
        _restate,
        (Measure.ROUGE1,),
        (512, 1024),
        12,
    ),
    Task(
        "data",
        "your prompts, greedy to the length of your answers",
        engine.greedy,
        _data,
        (Measure.FOUND, Measure.EDIT, Measure.ROUGE1),
        (0,),
        EVERY_RECORD,
    ),
)


def choose(names: Sequence[str]) -> tuple[Task, ...]:
    """The named tasks in the suite's order; no names mean all. Raises `ConfigError` naming one that is unknown."""
    known = [task.name for task in SUITE]
    for name in names:
        if name not in known:
            raise ConfigError(f"--tasks: {name!r} is unknown; known: {', '.join(known)}")
    return tuple(task for task in SUITE if not names or task.name in names)


def columns(
    subject: Subject, chosen: Sequence[Task], *, samples: int, seed: int, longest: int
) -> tuple[list[Column], list[str]]:
    """Build every sample. `samples` 0 takes each task's own number, `longest` 0 the model's context.

    Returns the columns, and a line for each point that was left out because it does not fit. Raises `ConfigError` when
    a task cannot be built from the held-out text.
    """
    limit = min(longest or subject.worker.model.spec.max_context, subject.worker.model.spec.max_context)
    made: list[Column] = []
    left_out: list[str] = []
    for task in chosen:
        count = min(samples or task.samples, len(subject.records)) if task.name == "data" else samples or task.samples
        for point in task.points if count else ():
            examples = _examples(subject, task, point, count, seed)
            fitting = tuple(e for e in examples if _size(e) <= limit)
            if len(fitting) < count:
                what = f"{task.name} at {point}" if point else f"{task.name}, {count - len(fitting)} of {count} prompts"
                size = max(map(_size, examples))
                left_out.append(f"{what}: up to {size} tokens of context needed, the limit is {limit}")
            if fitting:
                made.append(Column(task, point, fitting))
    return made, left_out


def _size(example: Example) -> int:
    return len(example.prompt) + len(example.answer)


def _examples(subject: Subject, task: Task, point: int, count: int, seed: int) -> tuple[Example, ...]:
    try:
        bare = [task.make(subject, seed, point, index) for index in range(count)]
    except ValueError as error:
        raise ConfigError(f"task {task.name} at {point}: {error}") from error
    return tuple(Example(join(subject.prefix, e.prompt), e.answer) for e in bare)
