"""Answers from the serving path: one `ModelRunner` over a codec's packed pages, several sequences side by side.

Prompts go through in chunks of whole pages, as a prefill node would send them. Answers are decoded one token per step
and sequence, as on a decode node. Teacher forcing feeds the true token whatever the model chose, so one wrong token
costs one token. The share of answers without a wrong token is the same as in a greedy run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hackkv.batch import Span
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import Worker
from measure.accuracy.metrics import ScoredAnswer
from measure.tasks import Example, Ids

CHUNK_TOKENS = 256
"""A multiple of every page size."""
BATCH_TOKENS = 16384
"""The most tokens of KV that a batch of several sequences holds. A longer sequence runs alone."""
LOGITS = 2**24
"""The most logits that are held at once."""

Run = Callable[[Worker, Sequence[Example]], list[ScoredAnswer]]


class ParallelSequences:
    """Sequences side by side, each at its own position."""

    def __init__(self, worker: Worker, capacities: Sequence[int]) -> None:
        pages = [worker.layout.pages(capacity) for capacity in capacities]
        ends = np.cumsum(pages).tolist()
        self._runner = ModelRunner(worker.model, worker.codec, ends[-1], len(pages))
        self._pages = [tuple(range(end - count, end)) for end, count in zip(ends, pages, strict=True)]
        self.held = [0] * len(pages)
        """Rows of each lane's cache."""
        self._evicted = [0] * len(pages)

    @property
    def positions(self) -> list[int]:
        """Tokens that each lane has read."""
        return [held + evicted for held, evicted in zip(self.held, self._evicted, strict=True)]

    def advance(self, rows: Sequence[Ids], prompts: Sequence[int] | None = None) -> list[Tensor]:
        """Add `rows[i]`, maybe none, to lane i; returns the hidden states [rows, hidden] of each lane.

        `prompts` are the lengths of whole prompts, of which these rows are parts.
        """
        of = prompts or [0] * len(rows)
        spans = [
            Span(i, self.held[i], len(ids), self._pages[i], self._evicted[i], of[i])
            for i, ids in enumerate(rows)
            if len(ids)
        ]
        hidden = self._runner.forward(spans, np.concatenate(rows).tolist())
        self.held = [at + len(ids) for at, ids in zip(self.held, rows, strict=True)]
        return list(hidden.split([len(ids) for ids in rows]))

    def prefill(self, prompts: Sequence[Ids], wanted: Sequence[int]) -> list[Tensor]:
        """Add prompts in chunks; returns the hidden states [wanted[i], hidden] of the last rows of each.

        A lane's first prompt loses the rows that the codec evicts. Later tokens attend to the rows that are left.
        """
        first = [0 if at else len(prompt) for at, prompt in zip(self.held, prompts, strict=True)]
        kept: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, max(map(len, prompts)), CHUNK_TOKENS):
            chunks = [prompt[start : start + CHUNK_TOKENS] for prompt in prompts]
            parts = self.advance(chunks, first)
            for out, part, prompt, count in zip(kept, parts, prompts, wanted, strict=True):
                out.append(part[max(0, len(prompt) - count - start) :])
        for i, tokens in enumerate(first):
            if tokens:
                self.held[i] = self._runner.end_prompt(Span(i, 0, tokens, self._pages[i]))
                self._evicted[i] = tokens - self.held[i]
        return [torch.cat(parts) for parts in kept]


def size(example: Example) -> int:
    """Tokens of context that an example needs."""
    return len(example.prompt) + len(example.answer)


def batches(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Batches of examples, in order. All examples of a batch fit `BATCH_TOKENS` at the length of the longest one."""
    batch: list[Example] = []
    for example in examples:
        longest = max(map(size, (*batch, example)))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def forced_prefill(worker: Worker, examples: Sequence[Example]) -> list[ScoredAnswer]:
    """Score the truth inside the prompt: no decode step is taken."""
    lanes = _lanes(worker, examples)
    rows = [np.concatenate((e.prompt, e.answer))[:-1] for e in examples]
    hidden = lanes.prefill(rows, [len(e.answer) for e in examples])
    return [_scored(worker, states, e) for states, e in zip(hidden, examples, strict=True)]


def forced_decode(worker: Worker, examples: Sequence[Example]) -> list[ScoredAnswer]:
    """Prefill the prompt, then feed the truth one token at a time."""
    lanes = _lanes(worker, examples)
    states = [[part] for part in lanes.prefill([e.prompt for e in examples], [1] * len(examples))]
    for step in range(max(len(e.answer) for e in examples) - 1):
        # The last token of an answer is never fed: nothing is asked after it.
        rows = [e.answer[step : step + 1] if step + 1 < len(e.answer) else e.answer[:0] for e in examples]
        for out, part in zip(states, lanes.advance(rows), strict=True):
            out.append(part)
    return [_scored(worker, torch.cat(parts), e) for parts, e in zip(states, examples, strict=True)]


def greedy(worker: Worker, examples: Sequence[Example]) -> list[ScoredAnswer]:
    """Prefill the prompt, then feed back the likeliest token until the truth's length or an end of sequence."""
    said = write(worker, [e.prompt for e in examples], [len(e.answer) for e in examples])
    nothing = np.empty(0)
    return [ScoredAnswer(one.ids, e.answer, nothing) for one, e in zip(said, examples, strict=True)]


@dataclass(frozen=True, slots=True)
class Written:
    """An answer that a model wrote freely."""

    ids: Ids
    """The tokens without the end of sequence."""
    ended: bool
    """The answer ended with an end of sequence, or because the caller had seen enough; False if it ran out of room."""


def write(
    worker: Worker, prompts: Sequence[Ids], most: Sequence[int], enough: Callable[[list[int]], bool] | None = None
) -> list[Written]:
    """Greedy answers of at most `most[i]` tokens, side by side. `enough(tokens so far)` may end an answer early."""
    lanes = ParallelSequences(worker, [len(prompt) + room for prompt, room in zip(prompts, most, strict=True)])
    said: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    hidden = lanes.prefill(prompts, [1] * len(prompts))
    while True:
        going = [i for i, part in enumerate(hidden) if len(part)]
        choices = worker.model.logits(torch.cat([hidden[i] for i in going])).argmax(-1).tolist()
        rows = [np.empty(0, np.int64) for _ in prompts]
        for i, token in zip(going, choices, strict=True):
            if token in worker.model.spec.eos_ids:
                ended[i] = True
                continue
            said[i].append(token)
            ended[i] = enough is not None and enough(said[i])
            if not ended[i] and len(said[i]) < most[i]:
                rows[i] = np.array([token])
        if not any(map(len, rows)):
            return [Written(np.array(ids, np.int64), end) for ids, end in zip(said, ended, strict=True)]
        hidden = lanes.advance(rows)


def _lanes(worker: Worker, examples: Sequence[Example]) -> ParallelSequences:
    return ParallelSequences(worker, [len(e.prompt) + len(e.answer) for e in examples])


def _scored(worker: Worker, hidden: Tensor, example: Example) -> ScoredAnswer:
    """First choices and likelihood of the truth, from the hidden states [answer, hidden] before each of its tokens."""
    truth = torch.from_numpy(example.answer)
    rows = max(1, LOGITS // worker.model.spec.vocab)
    choices, nlls = [], []
    for states, target in zip(hidden.split(rows), truth.split(rows), strict=True):
        logits = worker.model.logits(states).float()
        choices.append(logits.argmax(-1))
        nlls.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    return ScoredAnswer(torch.cat(choices).numpy(), example.answer, torch.cat(nlls).double().numpy())
