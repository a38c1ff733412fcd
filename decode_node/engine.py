"""One decode step: a token for every sequence of the batch. Runs in a thread of its own."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from hackkv.codec import Span
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, sample
from hackkv.pages import Grant
from hackkv.types import Token


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence on its way: `length` tokens are in the cache, `next_id` is the one to run next."""

    grant: Grant
    length: int
    next_id: int
    sampler: SamplerState
    joined_at: float
    started_at: float = 0.0
    """When its first step began."""
    stepped_at: float = 0.0
    """When its last step ended; 0 before the first."""
    attend_s: float = 0.0
    approximation_s: float = 0.0


class DecodeEngine:
    """Runs steps on one `ModelRunner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def step(self, batch: list[Sequence]) -> list[Token]:
        """Append each sequence's next token to its cache and choose the one after.

        Raises `NonFiniteError` whose `span` is the index at fault; no sequence has advanced then.
        """
        codec, layout = self._runner.codec, self._runner.layout
        began, attended, approximated = perf_counter(), codec.attend_s, codec.approximation_s
        spans = [Span(seq.grant.slot, seq.length, 1, seq.grant.pages[: layout.pages(seq.length + 1)]) for seq in batch]
        hidden = self._runner.forward(spans, [seq.next_id for seq in batch])
        tokens = sample(self._runner.model.logits(hidden), [seq.sampler for seq in batch])
        ended = perf_counter()
        for seq, token in zip(batch, tokens, strict=True):
            seq.started_at = seq.started_at or began
            seq.stepped_at = ended
            seq.length += 1
            seq.next_id = token.token_id
            # A step's time is every member's time: the stages are what a request waited for, not what it cost.
            seq.attend_s += codec.attend_s - attended
            seq.approximation_s += codec.approximation_s - approximated
        return tokens
