"""Questions about far earlier text: numbers, key-value pairs and a stretch of random tokens inside held-out text.

The numbers are needles as RULER has them (arXiv 2404.06654, several keys): small models find them, while they lose
passwords made of words.
Reading a long context costs far more than a question about it. So one context holds several items of each kind, and all
of them are asked for, one after another. Every true answer stands behind its question before the next is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from hackkv.model.worker import Worker
from measure import tasks
from measure.accuracy import engine
from measure.accuracy.cells import Found
from measure.accuracy.metrics import Measure
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of, left
from measure.tasks import Example, Ids, join

CONTEXTS: Final = {1024: 3, 2048: 2}
"""Tokens of a context -> number of contexts."""
FAR: Final = {4096: 2, 8192: 1}
"""Tokens -> number of contexts, for a task of its own: it takes longer, and few small models find anything there."""
OF_EACH: Final = 6
"""Numbers in each context, and key-value pairs in each context; all are asked for."""
SEGMENT, CUE = 40, 8


@dataclass(frozen=True, slots=True)
class ScoredQuestion:
    """A question after everything before it, and the measure to which its answer counts."""

    measure: Measure
    asked: Example


def prepare(contexts: Mapping[int, int], subject: Subject, limits: RunLimits) -> Prepared:
    """`limits.samples` contexts of every length (as many as `contexts` says unless set)."""
    asked, left_out = dict[int, list[list[ScoredQuestion]]](), list[str]()
    for length, count in contexts.items():
        if length > limits.context(subject):
            left_out.append(f"at {length}: the limit is {limits.context(subject)}")
            continue
        asked[length] = [_context(subject, limits.seed + i, length) for i in range(limits.samples or count)]

    def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
        for length in left(asked, done):
            scores: dict[Measure, list[float]] = {Measure.NEEDLE: [], Measure.RECALL: [], Measure.COPY: []}
            for questions in asked[length]:
                for question, right in zip(questions, _ask(worker, questions), strict=True):
                    scores[question.measure].append(
                        right.mean() if question.measure is Measure.COPY else float(right.all())
                    )
                advance(_size(questions))
            yield length, Found({name: [round(float(x), 6) for x in all_] for name, all_ in scores.items()})

    every = [question.asked for contexts in asked.values() for questions in contexts for question in questions]
    counts = ", ".join(f"{len(found)} contexts of {length}" for length, found in asked.items())
    digest = digest_of(part for e in every for part in (e.prompt, e.answer))
    says = f"{counts}; {OF_EACH} numbers, {OF_EACH} pairs and {SEGMENT - CUE} tokens to copy in each"
    return Prepared(sum(map(engine.size, every)), says, digest, tuple(asked), measure, left_out)


def _context(subject: Subject, seed: int, length: int) -> list[ScoredQuestion]:
    """Questions on one context, which stands in the first question. Together they have `length` tokens."""
    rng, phrases = np.random.default_rng(seed), subject.phrases
    keys = tasks.random_words(rng, phrases, 2 * OF_EACH * tasks.KEY_WORDS).reshape(2 * OF_EACH, tasks.KEY_WORDS)
    numbers = [subject.encode(f" {rng.integers(10_000, 100_000)}") for _ in range(OF_EACH)]
    values = [tasks.random_words(rng, phrases, tasks.VALUE_WORDS) for _ in range(OF_EACH)]
    body = tasks.random_segment(rng, phrases, SEGMENT)
    names = [subject.decode(key[:1]).strip() for key in keys[:OF_EACH]]
    told = [subject.encode(f"\nThe special magic number for {name} is:") for name in names]
    facts = [join(fact, number, phrases.stop, phrases.line_end) for fact, number in zip(told, numbers, strict=True)]
    notes = [
        join(tasks.note(phrases, key), value, phrases.line_end)
        for key, value in zip(keys[OF_EACH:], values, strict=True)
    ]
    questions = [
        *(
            ScoredQuestion(Measure.NEEDLE, Example(subject.encode(_asked(name)), n))
            for name, n in zip(names, numbers, strict=True)
        ),
        *(
            ScoredQuestion(Measure.RECALL, Example(tasks.note(phrases, key), v))
            for key, v in zip(keys[OF_EACH:], values, strict=True)
        ),
        _question(Measure.COPY, join(phrases.line_end, body[:CUE]), body[CUE:]),
    ]
    items = [*facts, *notes, join(phrases.line_end, body, phrases.line_end)]
    room = length - len(subject.prefix) - sum(map(len, items)) - _size(questions)
    order = rng.permutation(len(items))
    text = tasks.spread(rng, tasks.cut(rng, subject.filler, room), [items[i] for i in order])
    first = questions[0]
    opening = join(subject.prefix, text, first.asked.prompt)
    return [_question(first.measure, opening, first.asked.answer), *questions[1:]]


def _question(measure: Measure, prompt: Ids, answer: Ids) -> ScoredQuestion:
    return ScoredQuestion(measure, Example(prompt, answer))


def _asked(name: str) -> str:
    """The question with the beginning of its answer."""
    return f"\nWhat is the special magic number for {name}? The special magic number for {name} is:"


def _size(questions: list[ScoredQuestion]) -> int:
    return sum(engine.size(question.asked) for question in questions)


@torch.inference_mode()
def _ask(worker: Worker, questions: list[ScoredQuestion]) -> list[np.ndarray]:
    """For each question, whether each token of its answer is the model's first choice; the true answer is fed."""
    lanes, right = engine.ParallelSequences(worker, [_size(questions)]), list[np.ndarray]()
    unread: Ids = np.empty(0, np.int64)
    for question in questions:
        states = lanes.prefill([join(unread, question.asked.prompt)], [1])
        for before, _ in pairwise(question.asked.answer):
            states += lanes.advance([np.array([before])])
        choices = worker.model.logits(torch.cat(states)).argmax(-1).numpy()
        right.append(choices == question.asked.answer)
        unread = question.asked.answer[-1:]  # the last token of an answer is read with the next question
    return right
