"""One decode step: a token for every sequence of the batch, and a piece of each replay. Runs in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from hackkv.codec import Span
from hackkv.errors import NonFiniteError
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, sample
from hackkv.types import Token


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine remembers of a sequence from step to step."""

    pending: list[int]
    """Tokens that it has but that are not in the cache yet: one, or more in a replay."""
    sampler: SamplerState
    joined_at: float
    queue_s: float = 0.0
    """Until its first step began, swaps apart."""
    stepped_at: float = 0.0
    """When its last step ended; 0 before the first."""
    swapped_s: float = 0.0
    """In host memory, and on the way there and back."""
    attend_s: float = 0.0
    approximation_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """From its first step to the end of its last, swaps apart."""
        return self.stepped_at - self.joined_at - self.queue_s - self.swapped_s


class Work(NamedTuple):
    """A sequence's part in a step: the first of its pending tokens, as many as `span` has rows."""

    sequence: Sequence
    span: Span
    replay: bool
    """The tokens after these rows are known: none is chosen."""


class DecodeEngine:
    """Runs steps on one `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def step(self, batch: list[Work]) -> list[Token | None]:
        """Append each one's rows to its cache; choose the token after them, None in a replay.

        Replays run as a batch of their own, so that those who decode do the same arithmetic with and without them.
        Raises `NonFiniteError` whose `span` is the index in `batch` at fault; no sequence has advanced then.
        """
        codec = self._runner.codec
        began, attended, approximated = perf_counter(), codec.attend_s, codec.approximation_s
        replays = [index for index, work in enumerate(batch) if work.replay]
        if replays:
            with _named(replays):
                self._forward(batch, replays)
        chosen = iter(self._choose(batch, [index for index, work in enumerate(batch) if not work.replay]))
        tokens = [None if work.replay else next(chosen) for work in batch]
        ended = perf_counter()
        attend_s, approximation_s = codec.attend_s - attended, codec.approximation_s - approximated
        for work, token in zip(batch, tokens, strict=True):
            seq = work.sequence
            if not seq.stepped_at:
                seq.queue_s = began - seq.joined_at - seq.swapped_s
            seq.stepped_at = ended
            del seq.pending[: work.span.count]
            if token is not None:
                seq.pending.append(token.token_id)
            # A step's time is every member's time: the stages are what a request waited for, not what it cost.
            seq.attend_s += attend_s
            seq.approximation_s += approximation_s
        return tokens

    def _choose(self, batch: list[Work], at: list[int]) -> list[Token]:
        """The next token of each of `batch[at]`."""
        if not at:
            return []
        model, samplers = self._runner.model, [batch[index].sequence.sampler for index in at]
        with _named(at):
            return sample(model.logits(self._forward(batch, at)), samplers, model.kernels)

    def _forward(self, batch: list[Work], at: list[int]) -> Tensor:
        """Hidden states of the rows of `batch[at]`."""
        works = [batch[index] for index in at]
        ids = [token_id for work in works for token_id in work.sequence.pending[: work.span.count]]
        return self._runner.forward([work.span for work in works], ids)


@contextlib.contextmanager
def _named(at: Series[int]) -> Iterator[None]:
    """Translate the span that an error names, an index into `at`, to the index in the batch."""
    try:
        yield
    except NonFiniteError as error:
        error.span = at[error.span]
        raise
