"""One decode step: one token for every sequence, or some rows of its replay. Runs in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from hackkv.batch import Span
from hackkv.errors import SequenceError
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.types import Token


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine remembers of a sequence from step to step."""

    pending: list[int]
    """Tokens that are known and not in the cache yet: one, or more in a replay."""
    sampler: SamplerState
    joined_at: float
    evicted: int = 0
    """Rows of the prompt that prefill evicted. A token's position is its row plus this number."""
    queue_s: float = 0.0
    """Seconds from landing until its first step began, without swaps."""
    stepped_at: float = 0.0
    """When its last step ended; 0 before the first."""
    swapped_s: float = 0.0
    """Seconds in host memory, and on the way there and back."""
    attend_s: float = 0.0
    approximation_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the start of its first step to the end of its last, without swaps."""
        return self.stepped_at - self.joined_at - self.queue_s - self.swapped_s


class StepPart(NamedTuple):
    """A sequence's part in a step: the first of its pending tokens, as many as `span` has rows."""

    sequence: Sequence
    span: Span
    replay: bool
    """The tokens after these rows are known: none is chosen."""


class DecodeEngine:
    """Runs steps on one `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def record(self) -> None:
        """See `ModelRunner.record`."""
        self._runner.record()

    # A thread that stayed in the mode would save 2 of a step's 2,400 us, and would have to leave it before its guard is
    # collected: whichever thread collects a guard that was never left leaves inference mode.
    @torch.inference_mode()
    def step(self, batch: list[StepPart]) -> list[Token | None]:
        """Append the rows of every part to its cache. Return the token after them, or None in a replay.

        Replays run as a batch of their own, so the other sequences do the same arithmetic with and without them.
        Raises `SequenceError` whose `span` is the index in `batch` at fault. No sequence has advanced then.
        """
        codec = self._runner.codec
        began, attended, approximated = perf_counter(), codec.attend_s, codec.approximation_s
        replays = [index for index, part in enumerate(batch) if part.replay]
        with self._runner.memory.lanes.computing():
            if replays:
                with _named(replays):
                    self._runner.forward(*_rows(batch, replays))
            chosen = iter(self._choose(batch, [index for index, part in enumerate(batch) if not part.replay]))
        tokens = [None if part.replay else next(chosen) for part in batch]
        ended = perf_counter()
        attend_s, approximation_s = codec.attend_s - attended, codec.approximation_s - approximated
        for part, token in zip(batch, tokens, strict=True):
            seq = part.sequence
            if not seq.stepped_at:
                seq.queue_s = began - seq.joined_at - seq.swapped_s
            seq.stepped_at = ended
            del seq.pending[: part.span.count]
            if token is not None:
                seq.pending.append(token.token_id)
            # Every sequence of a step is charged the whole step: a stage is the time that a request waited.
            seq.attend_s += attend_s
            seq.approximation_s += approximation_s
        return tokens

    def _choose(self, batch: list[StepPart], at: list[int]) -> list[Token]:
        """The next token of each of `batch[at]`."""
        if not at:
            return []
        with _named(at):
            return self._runner.choose(*_rows(batch, at), [batch[index].sequence.sampler for index in at])


def _rows(batch: list[StepPart], at: list[int]) -> tuple[list[Span], list[int]]:
    """The rows of `batch[at]` and their tokens."""
    parts = [batch[index] for index in at]
    ids = [token_id for part in parts for token_id in part.sequence.pending[: part.span.count]]
    return [part.span for part in parts], ids


@contextlib.contextmanager
def _named(at: Series[int]) -> Iterator[None]:
    """Translate the span that an error names, an index into `at`, to the index in the batch."""
    try:
        yield
    except SequenceError as error:
        error.span = at[error.span]
        raise
