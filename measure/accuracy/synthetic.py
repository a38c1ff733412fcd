"""Questions with one right answer each, about text that no trainer of ours saw; and the user's own data.

A sample is a pure function of (seed, point, index). `Asked` says how samples are answered and scored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hackkv.model.worker import Worker
from measure import tasks
from measure.accuracy import engine
from measure.accuracy.cells import Found
from measure.accuracy.metrics import TAIL, Measure, score
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of, left
from measure.tasks import Example, join

COPY_SEGMENT, COPY_CUE = 40, 8
FREE_TOKENS = 48
RESTATE_WORDS, RESTATE_CUE = 48, 8
TRIES = 1000
EVERY_RECORD = sys.maxsize

Make = Callable[[Subject, int, int, int], Example]
"""(subject, seed, point, index of the sample) -> prompt and answer. Raises `ValueError` if it cannot be built."""


def window(subject: Subject, seed: int, point: int, index: int) -> Example:
    window = tasks.cut(np.random.default_rng(seed + index), subject.filler, point)
    return Example(window[:1], window[1:])


def window_tail(subject: Subject, seed: int, point: int, index: int) -> Example:
    window = tasks.cut(np.random.default_rng(seed + index), subject.filler, point)
    return Example(window[:-TAIL], window[-TAIL:])


def copy(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.copy(seed + index, subject.phrases, subject.filler, point, COPY_SEGMENT, COPY_CUE)


def recall(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.recall(seed + index, subject.phrases, subject.filler, point)


def needle(subject: Subject, seed: int, point: int, index: int) -> Example:
    return tasks.needle(seed + index, subject.phrases, subject.filler, point)


def code(subject: Subject, seed: int, point: int, index: int) -> Example:
    """`point` tokens of a held-out Python file up to the end of a line, and the `FREE_TOKENS` that follow."""
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


def restate(subject: Subject, seed: int, point: int, index: int) -> Example:
    """Words, then real text, then the first of the words again. The other words are the answer.

    Real sentences in place of the words were tried: a small model soon leaves them for a likelier sentence.
    """
    rng = np.random.default_rng(seed + index)
    words = tasks.random_words(rng, subject.phrases, RESTATE_WORDS)
    cue, answer = words[:RESTATE_CUE], words[RESTATE_CUE:]
    text = tasks.cut(rng, subject.filler, point - len(words) - len(cue) - len(answer))
    return Example(join(words, text, cue), answer)


def data(subject: Subject, seed: int, point: int, index: int) -> Example:
    record = subject.records[index]
    return Example(subject.encode(record.prompt), subject.encode(record.answer))


@dataclass(frozen=True, slots=True)
class Asked:
    """`Task.prepare` for samples of one maker, run in one way."""

    make: Make
    run: engine.Run
    measures: tuple[Measure, ...]
    points: tuple[int, ...]
    """Distances or context lengths, in tokens."""
    samples: int

    def __call__(self, subject: Subject, limits: RunLimits) -> Prepared:
        """Build every sample."""
        count, limit = limits.samples or self.samples, limits.context(subject)
        if self.make is data:
            count = min(count, len(subject.records))
        asked, left_out = dict[int, list[Example]](), list[str]()
        for point in self.points if count else ():
            examples = [self.make(subject, limits.seed, point, index) for index in range(count)]
            examples = [Example(join(subject.prefix, e.prompt), e.answer) for e in examples]
            fitting = [e for e in examples if engine.size(e) <= limit]
            if len(fitting) < count:
                what = f"at {point}" if point else f"{count - len(fitting)} of {count} prompts"
                needed = max(map(engine.size, examples))
                left_out.append(f"{what}: up to {needed} tokens of context needed, the limit is {limit}")
            if fitting:
                asked[point] = fitting

        def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
            for point in left(asked, done):
                yield point, self._found(subject, worker, asked[point], advance)

        parts = [part for examples in asked.values() for e in examples for part in (e.prompt, e.answer)]
        tokens = sum(map(len, parts))
        return Prepared(tokens, f"{count} at each point", digest_of(parts), tuple(asked), measure, left_out)

    def _found(self, subject: Subject, worker: Worker, examples: Sequence[Example], advance: Advance) -> Found:
        answers = []
        for batch in engine.batches(examples):
            answers += self.run(worker, batch)
            advance(sum(map(engine.size, batch)))
        scores = {m: [round(score(m, one, subject.decode), 6) for one in answers] for m in self.measures}
        return Found(scores, [one.ids.tolist() for one in answers] if self.run is engine.greedy else [])
