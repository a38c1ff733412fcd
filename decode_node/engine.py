"""One decode step: one token for every sequence, or some rows of its replay. Runs in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch

from hackkv.batch import Span
from hackkv.errors import NonFiniteError, SequenceError
from hackkv.model.runner import LaunchedStep, ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.types import Token

Outcome: TypeAlias = Token | NonFiniteError | None
"""The result of a part of a step: the token after its rows, the error in its place, or None in a replay."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's state of a sequence, from step to step."""

    pending: list[int]
    """Tokens that are known but not in the cache yet: one, or more in a replay."""
    sampler: SamplerState
    joined_at: float
    evicted: int = 0
    """Rows of the prompt that prefill evicted. A token's position is its row plus this number."""
    queue_s: float = 0.0
    """Seconds from landing until its first step began, without swaps."""
    stepped_at: float = 0.0
    """When its last step ended (perf_counter); 0 before the first."""
    swapped_s: float = 0.0
    """Seconds in host memory, including the copies there and back."""
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
    """Whether the tokens after these rows are known, so that none is chosen."""


@dataclass(frozen=True, slots=True)
class OverlappedStep:
    """A step that the device was given before the previous step was over."""

    parts: Series[StepPart]
    begun: LaunchedStep

    def row_of(self, part: StepPart) -> int | None:
        """The index of the row that computes `part`; None if the step does not contain it."""
        return next((row for row, each in enumerate(self.parts) if _same(each, part)), None)


class DecodeEngine:
    """Runs steps on one `ModelRunner`, and looks one step ahead if the runner can.

    While the device computes a step, it is given the next one for the same sequences, whose tokens only the device
    knows. So the device does not wait while the host reads tokens, sends them and plans. The plan of the next step may
    differ. Rows of sequences that have left it are then wasted. Sequences that have joined it run behind once, as a
    batch of their own.

    A step ahead writes one row behind the rows of each sequence, into its slot, and nothing else. The row counts only
    if the very next step contains it. Copies into a slot that gets another holder wait for the row (`Lanes.written`).
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._ahead: OverlappedStep | None = None
        self.foreseen = 0
        """Number of tokens that were chosen by steps begun ahead."""

    def record(self) -> None:
        """See `ModelRunner.record`."""
        self._runner.record()

    # Staying in inference mode would save 2 of a step's 2,400 us. But the thread would have to leave the mode before
    # the guard is collected: whichever thread collects an open guard leaves inference mode itself.
    @torch.inference_mode()
    def step(self, batch: list[StepPart]) -> list[Outcome]:
        """Append the rows of every part to its cache. Return, for each part, the token after its rows, None in a
        replay, or a `NonFiniteError`, which does not concern the other parts.

        Replays run as a batch of their own, so the other sequences do the same arithmetic with and without them.
        Raises `SequenceError` if a replay fails or a grammar cannot go on; its `span` is the index of the part in
        `batch`. No sequence has advanced then.
        """
        codec = self._runner.codec
        began, attended, approximated = perf_counter(), codec.attend_s, codec.approximation_s
        replays = [index for index, part in enumerate(batch) if part.replay]
        ahead, self._ahead = self._ahead, None
        with self._runner.memory.lanes.computing():
            if replays:
                with _named(replays):
                    self._runner.forward(*_rows(batch, replays))
            at = [index for index, part in enumerate(batch) if not part.replay]
            chosen = iter(self._choose(batch, at, ahead, alone=not replays))
        tokens: list[Outcome] = [None if part.replay else next(chosen) for part in batch]
        ended = perf_counter()
        attend_s, approximation_s = codec.attend_s - attended, codec.approximation_s - approximated
        for part, token in zip(batch, tokens, strict=True):
            seq = part.sequence
            if not seq.stepped_at:
                seq.queue_s = began - seq.joined_at - seq.swapped_s
            seq.stepped_at = ended
            del seq.pending[: part.span.count]
            if isinstance(token, Token):
                seq.pending.append(token.token_id)
            # Each sequence is charged the whole step, since a stage is the time for which a request waited.
            seq.attend_s += attend_s
            seq.approximation_s += approximation_s
        return tokens

    def forget(self) -> None:
        """Discard the step ahead: no step comes next, and slots and pages may change holders before one does."""
        self._ahead = None

    def _choose(
        self, batch: list[StepPart], at: list[int], ahead: OverlappedStep | None, *, alone: bool
    ) -> list[Token | NonFiniteError]:
        """The next token of each of `batch[at]`, or its error. Some may be under way in `ahead`. With `alone` the step
        contains nothing else."""
        runner = self._runner
        found = {index: row for index in at if ahead and (row := ahead.row_of(batch[index])) is not None}
        joined = [index for index in at if index not in found]
        before = dict[int, tuple[LaunchedStep, int]]()
        if ahead and found:
            runner.end_after([batch[index].span for index in found])
            before |= {index: (ahead.begun, row) for index, row in found.items()}
        if joined:
            with _named(joined):
                begun = runner.begin(*_rows(batch, joined), _samplers(batch, joined))
            before |= {index: (begun, row) for row, index in enumerate(joined)}
        if alone and at:
            self._look_ahead([(batch[index], before[index]) for index in at])
        outcomes = dict[int, Token | NonFiniteError]()
        for some in (list(found), joined):
            if some:
                begun, rows = before[some[0]][0], [before[index][1] for index in some]
                ended = runner.end(begun, rows, *_rows(batch, some), _samplers(batch, some))
                outcomes |= zip(some, ended, strict=True)
        self.foreseen += len(found)
        return [outcomes[index] for index in at]

    def _look_ahead(self, now: Series[tuple[StepPart, tuple[LaunchedStep, int]]]) -> None:
        """Begin the step after that of these parts, unless one of its choices depends on tokens that the host does not
        know yet."""
        if not self._runner.looks_ahead([part.span for part, _ in now]):
            return
        coming = [(part, row) for part, row in now if not part.sequence.sampler.ends]
        if not coming or not all(part.sequence.sampler.foresees for part, _ in coming):
            return
        parts = [part._replace(span=replace(part.span, held=part.span.held + 1)) for part, _ in coming]
        states = [part.sequence.sampler for part in parts]
        begun = self._runner.begin_after([part.span for part in parts], [row for _, row in coming], states)
        self._ahead = OverlappedStep(parts, begun)


def _same(begun: StepPart, part: StepPart) -> bool:
    """Whether a part that was begun ahead is `part`. Only the number of its pages may have grown."""
    mine, its = begun.span, part.span
    return begun.sequence is part.sequence and (mine.slot, mine.held) == (its.slot, its.held)


def _samplers(batch: list[StepPart], at: list[int]) -> list[SamplerState]:
    return [batch[index].sequence.sampler for index in at]


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
