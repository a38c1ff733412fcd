"""Choosing the next token of every sequence in a batch.

The order of operations, and the meaning of each parameter, is vLLM's; `hack_kernels.choosing` defines the arithmetic to
the bit, and a backend's `RowKernels.choose` computes it for the whole batch in one call:

    log-probabilities are reported of the raw logits, log_softmax(logits)
    ids outside the mask (of the request's grammar, `hackkv.guide`) = -inf;  logits += logit_bias
    end and stop tokens = -inf until min_tokens, unless nothing else is left
    penalties: repetition, then frequency and presence
    temperature 0: the largest, ties to the smallest id
    else p = softmax(logits / temperature); keep min_p (relative to the largest), then top_k, then top_p; draw

The draw for output token i takes one uniform number, Philox(key = seed, counter = i). So a choice is a function of
(logits, sampling, prompt, tokens so far) alone: any node can replay it, whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from hack_kernels.base import RowKernels
from hack_kernels.choosing import NONE_ALLOWED, NOT_FINITE, ChoiceInput, ChoiceRules, ChosenIds, Scores
from hack_kernels.rowwise import Rowwise
from torch import Tensor

from hackkv.errors import GuideError, NonFiniteError
from hackkv.guide import Guide
from hackkv.packing import to_device
from hackkv.types import Finish, Logprob, Sampling, Token

ROWWISE = Rowwise()


class SamplerState:
    """All that the choice of a request's next token depends on beside logits: parameters, prompt, output so far."""

    __slots__ = ("_rules", "_stops", "chooser", "emitted", "guide", "sampling")

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
        emitted: Iterable[int] = (),
        kernels: RowKernels = ROWWISE,
        guide: Guide | None = None,
    ) -> None:
        """Start from `prompt_ids` and the output tokens `emitted` so far (a replay passes them all).

        `kernels` are those that `sample` will be given. `guide` is that of `sampling.grammar`, if there is one, and
        stands after `emitted`.
        """
        self.sampling = sampling
        self.guide: Guide | None = None
        ends = frozenset[int]() if sampling.ignore_eos and guide is None else frozenset(eos_ids)
        self._stops = frozenset(sampling.stop_token_ids) | ends
        self._rules = _rules(sampling, self._stops)
        self.chooser = kernels.new_chooser(self._rules, prompt_ids)
        self.emitted = 0
        """Output tokens so far; the next one has this index."""
        for token_id in emitted:
            self.accept(token_id)
        self.guide = guide

    @property
    def foresees(self) -> bool:
        """Whether the choice after the next one does not depend on the next one."""
        return self.guide is None and self.sampling.logprobs is None and self._rules.foresees

    @property
    def ends(self) -> bool:
        """Whether the next token is the last one whatever it is."""
        return self.emitted + 1 >= self.sampling.max_tokens

    def accept(self, token_id: int) -> Finish | None:
        """Append an output token; says whether, and why, the sequence ends with it."""
        self.emitted += 1
        if self.guide is not None:
            self.guide.accept(token_id)
        self.chooser.append(token_id)
        if token_id in self._stops:
            return Finish.STOP
        return Finish.LENGTH if self.emitted >= self.sampling.max_tokens else None


def sample(
    logits: Tensor,
    states: Sequence[SamplerState],
    kernels: RowKernels = ROWWISE,
) -> list[Token]:
    """Choose one token per row of `logits` [B, vocab] and advance the row's state.

    Raises `NonFiniteError` whose `span` is the first row that has no next token, and what `choosing` raises; then no
    state has advanced.
    """
    chosen = choosing(logits, states, kernels).ids()
    if min(chosen) < 0:
        row = next(row for row, token_id in enumerate(chosen) if token_id < 0)
        raise no_choice(row, chosen[row])
    return accept(dict(enumerate(chosen)), logits, states, kernels)


def choosing(
    logits: Tensor,
    states: Sequence[SamplerState],
    kernels: RowKernels,
    faulty: Tensor | None = None,
    *,
    later: bool = False,
) -> ChosenIds:
    """The choice of a token per row of `logits` [B, vocab], which the device may still have to make.

    With `later` it is the choice after the next one, for states that foresee it. Raises `GuideError` with the row whose
    grammar cannot go on.
    """
    allowed = masks(states, logits.shape[1])
    if allowed is not None:
        allowed = to_device(allowed, logits.device)
    given = ChoiceInput(logits, [state.chooser for state in states], faulty, allowed)
    return kernels.choosing(given, later=later)


def accept(
    chosen: Mapping[int, int], logits: Tensor, states: Sequence[SamplerState], kernels: RowKernels
) -> list[Token]:
    """Advance each state by its chosen id. `chosen` are rows of `logits`, in the order of `states`, and their ids."""
    scores = _scores(logits, states, chosen, kernels)
    tokens = []
    for state, (row, token_id) in zip(states, chosen.items(), strict=True):
        index, finish = state.emitted, state.accept(token_id)
        tokens.append(_token(index, token_id, finish, scores[row]) if row in scores else Token(index, token_id, finish))
    return tokens


def no_choice(row: int, found: int) -> NonFiniteError:
    """The error of a row that has no next id, whose `span` is the row; `found` says why (`RowKernels.choose`)."""
    what = {NOT_FINITE: "are not finite", NONE_ALLOWED: "allow no token"}[found]
    return NonFiniteError(f"logits of row {row} {what}", span=row)


def masks(states: Sequence[SamplerState], vocab: int) -> Tensor | None:
    """The tokens that the grammar of each row allows, [B, ceil(vocab / 32)] int32 as in `ChoiceInput`; None for all.

    Raises `GuideError` whose `span` is the first row whose grammar cannot go on.
    """
    if all(state.guide is None for state in states):
        return None
    words = torch.full((len(states), -(-vocab // 32)), -1, dtype=torch.int32)
    for row, state in enumerate(states):
        if state.guide is not None:
            try:
                bits = state.guide.allowed()
            except GuideError as error:
                error.span = row
                raise
            packed = words[row].numpy().view(np.uint8)
            packed[:] = 0
            known = min(packed.size, bits.size)
            packed[:known] = bits[:known]
    return words


def _rules(sampling: Sampling, stops: frozenset[int]) -> ChoiceRules:
    return ChoiceRules(
        seed=sampling.seed % 2**64,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
        bias=sampling.logit_bias,
        barred=tuple(sorted(stops)),
        barred_until=sampling.min_tokens,
    )


def _scores(
    logits: Tensor, states: Sequence[SamplerState], chosen: Mapping[int, int], kernels: RowKernels
) -> dict[int, Scores]:
    """The scores of the rows whose requests ask for log-probabilities."""
    asked = zip(states, chosen, strict=True)
    tops = {row: state.sampling.logprobs for state, row in asked if state.sampling.logprobs is not None}
    if not tops:
        return {}
    rows = list(tops)
    found = kernels.score(logits[rows], [chosen[row] for row in rows], list(tops.values()))
    return dict(zip(rows, found, strict=True))


def _token(index: int, token_id: int, finish: Finish | None, scores: Scores) -> Token:
    logprob, best = scores
    return Token(index, token_id, finish, logprob, tuple(Logprob(at, value) for at, value in best))
