"""Chat: what a person would ask, answered greedily to the end. Do answers keep their length, their end, their words?

A codec that damages a model rarely stops it: the model rambles. So not only the words are compared with exact KV's, but
also the length of answers and whether they end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from hackkv.model.worker import Worker
from measure.accuracy import engine
from measure.accuracy.cells import Found
from measure.accuracy.metrics import Measure
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of, left
from measure.tasks import Example, Ids

MOST_TOKENS: Final = 256
PASSAGE: Final = 1200
"""Tokens of a document that a request is about."""

SHORT: Final = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "Give me five tips for learning a new language.",
    "What is the difference between a list and a tuple in Python?",
    "Translate 'Good morning, how are you?' into French.",
    "Who wrote Romeo and Juliet, and what is the play about?",
    "How do I boil an egg? Give numbered steps.",
    "What are the three states of matter?",
    "Write a Python function that returns the largest number of a list.",
    "Why do the leaves of trees change colour in autumn?",
    "Suggest a name for a grey cat, and say why.",
    "Write a polite e-mail that declines an invitation to a dinner.",
    "What does a router do in a computer network?",
    "Name three renewable sources of energy and one drawback of each.",
    "Tell me a very short story about a child who finds a key.",
)
ABOUT_TEXT: Final = (
    "Summarize the following text in two sentences.",
    "What is the following text about? Answer in one sentence.",
    "List three things that the following text explains.",
    "Which words in the following text are technical? Name a few.",
)


def prepare(subject: Subject, limits: RunLimits) -> Prepared:
    """Point 0: short requests. Point `PASSAGE`: requests about a text of that many tokens. `limits.samples` of each."""
    passages = [d for d in sorted(subject.documents, key=lambda d: -len(d.text)) if not d.is_code]
    abouts = [f"{ABOUT_TEXT[i % len(ABOUT_TEXT)]}\n\n{_passage(subject, d.text)}" for i, d in enumerate(passages)]
    asked = dict[int, list[Ids]]()
    for point, texts in ((0, list(SHORT)), (PASSAGE, abouts[: 2 * len(ABOUT_TEXT)])):
        prompts = [_prompt(subject, text) for text in texts[: limits.samples or len(texts)]]
        fitting = [prompt for prompt in prompts if len(prompt) + MOST_TOKENS <= limits.context(subject)]
        if fitting:
            asked[point] = fitting

    def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
        for point in left(asked, done):
            yield point, _answers(worker, asked[point], advance)

    every = [prompt for prompts in asked.values() for prompt in prompts]
    counts = " and ".join(
        f"{len(prompts)} {'about a text of some ' + str(point) + ' tokens' if point else 'short ones'}"
        for point, prompts in asked.items()
    )
    tokens = sum(len(prompt) + MOST_TOKENS for prompt in every)
    return Prepared(tokens, counts, digest_of(every), tuple(asked), measure)


def _passage(subject: Subject, text: str) -> str:
    return subject.decode(subject.encode(text)[:PASSAGE])


def _prompt(subject: Subject, text: str) -> Ids:
    return np.array(subject.tokenizer.chat([{"role": "user", "content": text}]), np.int64)


def _answers(worker: Worker, prompts: list[Ids], advance: Advance) -> Found:
    room = np.zeros(MOST_TOKENS, np.int64)
    said = list[engine.Written]()
    for batch in engine.batches([Example(prompt, room) for prompt in prompts]):
        said += engine.write(worker, [e.prompt for e in batch], [MOST_TOKENS] * len(batch))
        advance(sum(map(engine.size, batch)))
    scores = {
        Measure.LENGTH: [float(len(one.ids)) for one in said],
        Measure.UNFINISHED: [float(not one.ended) for one in said],
    }
    return Found(scores, ids=[one.ids.tolist() for one in said])
