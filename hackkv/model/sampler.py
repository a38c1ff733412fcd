"""Choosing the next token of every sequence in a batch.

The order of operations, and the meaning of each parameter, is vLLM's:

    log-probabilities are reported of the raw logits, log_softmax(logits)
    logits += logit_bias;  end and stop tokens = -inf until min_tokens
    repetition:  logit /= r if it is positive, *= r if not, for every token of prompt or output
    logits -= frequency * (times in output) + presence * (in output)
    temperature 0: the largest, ties to the smallest id
    else p = softmax(logits / temperature); keep min_p (relative to the largest), then top_k, then top_p; draw

The draw for output token i takes one uniform number, Philox(key = seed, counter = i), and inverts the cumulative
distribution of the kept tokens, most probable first and ties by id. So a choice is a function of (logits, sampling,
prompt, tokens so far) alone: any node can replay it, whatever else is in its batch. Arithmetic is float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from hack_kernels.base import RowKernels
from hack_kernels.rowwise import Rowwise
from torch import Tensor

from hackkv.errors import NonFiniteError
from hackkv.types import Finish, Logprob, Sampling, Token

Row: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

GROUP = 16
"""Values per group in `_order`, which finds its threshold from the largest value of each group."""

UNIFORMS = 64
"""Random numbers that a state makes at once: creating a generator costs more than drawing these."""


class SamplerState:
    """All that the choice of a request's next token depends on beside logits: parameters, prompt, output so far."""

    __slots__ = (
        "_barred",
        "_counts",
        "_first_uniform",
        "_known",
        "_stops",
        "_uniforms",
        "emitted",
        "greedy",
        "plain",
        "repeated",
        "sampling",
    )

    def __init__(
        self, sampling: Sampling, prompt_ids: Iterable[int], eos_ids: Iterable[int], emitted: Iterable[int] = ()
    ) -> None:
        """Start from `prompt_ids` and the output tokens `emitted` so far (a replay passes them all)."""
        self.sampling = sampling
        self.greedy = sampling.temperature == 0
        self._stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))
        self._barred = np.array(sorted(self._stops), dtype=np.int64)
        self._counts: Counter[int] = Counter()
        self._known: set[int] = set(prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self.repeated = np.fromiter(self._known, dtype=np.int64)
        """Every token of prompt and output once, if there is a penalty for repetition."""
        self._uniforms: list[float] = []
        self._first_uniform = 0
        self.plain = (
            not sampling.logit_bias
            and sampling.repetition_penalty == 1.0
            and sampling.frequency_penalty == 0.0
            and sampling.presence_penalty == 0.0
        )
        """No penalty or bias ever touches this request's logits (min_tokens still may)."""
        self.emitted = 0
        """Output tokens so far; the next one has this index."""
        for token_id in emitted:
            self.accept(token_id)

    @property
    def untouched(self) -> bool:
        """The next token is chosen from the raw logits."""
        return self.plain and not self._stops_barred

    @property
    def takes_largest(self) -> bool:
        """The next token is the one with the largest raw logit, and no log-probabilities are reported."""
        return self.greedy and self.untouched and self.sampling.logprobs is None

    @property
    def _stops_barred(self) -> bool:
        return self.emitted < self.sampling.min_tokens and self._barred.size > 0

    def accept(self, token_id: int) -> Finish | None:
        """Append an output token; says whether, and why, the sequence ends with it."""
        self.emitted += 1
        if not self.plain:
            self._counts[token_id] += 1
            if self.sampling.repetition_penalty != 1.0 and token_id not in self._known:
                self._known.add(token_id)
                self.repeated = np.append(self.repeated, token_id)
        if token_id in self._stops:
            return Finish.STOP
        return Finish.LENGTH if self.emitted >= self.sampling.max_tokens else None

    def adjust(self, logits: Row) -> Row:
        """A copy of `logits` [vocab] after bias, min_tokens and penalties; ids beyond the vocabulary are ignored."""
        sampling, row = self.sampling, logits.copy()
        for token_id, bias in sampling.logit_bias:
            if token_id < row.size:
                row[token_id] += bias
        if self._stops_barred:
            row[self._barred[self._barred < row.size]] = -math.inf
        if sampling.repetition_penalty != 1.0:
            values, penalty = row[self.repeated], sampling.repetition_penalty
            row[self.repeated] = np.where(values > 0, values / penalty, values * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            seen = np.fromiter(self._counts.keys(), dtype=np.int64)
            times = np.fromiter(self._counts.values(), dtype=np.float64)
            row[seen] -= sampling.frequency_penalty * times + sampling.presence_penalty
        return row

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next output token."""
        at = self.emitted - self._first_uniform
        if not 0 <= at < len(self._uniforms):
            self._first_uniform, at = self.emitted, 0
            self._uniforms = uniforms(self.sampling.seed, self.emitted, UNIFORMS)
        return self._uniforms[at]


class FaultyRow(Exception):
    """A row's logits are undefined, because K or V of its sequence is not finite in FP16."""


def sample(
    logits: Tensor, states: Sequence[SamplerState], kernels: RowKernels | None = None, faulty: Tensor | None = None
) -> list[Token]:
    """Choose one token per row of `logits` [B, vocab] and advance the row's state. `kernels` are torch by default.

    Raises `FaultyRow` if any of `faulty` [B] bool is set, else `NonFiniteError` whose `span` is the first row that
    holds NaN or +Inf. When it raises, no state has advanced.
    """
    largest = (kernels or Rowwise()).largest(logits, faulty)
    if -2 in largest:
        raise FaultyRow
    if -1 in largest:
        row = largest.index(-1)
        raise NonFiniteError(f"logits of row {row} are not finite", span=row)
    others = [row for row, state in enumerate(states) if not state.takes_largest]
    rows = dict(zip(others, logits[others].double().cpu().numpy(), strict=True)) if others else {}
    tokens = []
    for row, state in enumerate(states):
        if row in rows:
            tokens.append(_choose(rows[row], state))
        else:
            index, token_id = state.emitted, largest[row]
            tokens.append(Token(index, token_id, state.accept(token_id)))
    return tokens


def prompt_logprobs(logits: Tensor, first: int, ids: Sequence[int], top: int) -> list[Token]:
    """Log-probabilities of prompt tokens `ids`, whose first has position `first` (>= 1), with `top` alternatives.

    Row j of `logits` [len(ids), vocab] is the prediction made at position first + j - 1.
    """
    rows = logits.double().cpu().numpy()
    return [_reported(first + j, token_id, None, rows[j], top) for j, token_id in enumerate(ids)]


def _choose(raw: Row, state: SamplerState) -> Token:
    sampling, index = state.sampling, state.emitted
    row = raw if state.untouched else state.adjust(raw)
    token_id = int(row.argmax()) if state.greedy else draw(row, sampling, state.uniform())
    finish = state.accept(token_id)
    if sampling.logprobs is None:
        return Token(index, token_id, finish)
    return _reported(index, token_id, finish, raw, sampling.logprobs)


def uniforms(seed: int, first: int, count: int) -> list[float]:
    """The numbers in [0, 1) that decide output tokens `first` and following of a request with this seed."""
    words = 4  # Philox makes four words per counter; a token uses the first
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=first))
    numbers: list[float] = generator.random(words * count)[::words].tolist()
    return numbers


def draw(row: Row, sampling: Sampling, u: float) -> int:
    """The token that `u` in [0, 1) selects from `row` (float64 [vocab]) under temperature, min_p, top_k and top_p."""
    # Weights are relative to the largest, which has weight 1, so that a tiny temperature cannot overflow.
    weights = np.exp((row - row.max()) / sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0
    if 0 < sampling.top_k < weights.size:
        order = _order(weights, sampling.top_k)
        ranked = weights[order]
        total = float(ranked.sum())
    else:
        total = float(weights.sum())
        # The search below ends at cumulative weight `share * total` of the sorted row. Sorting the whole row would take
        # most of the time, so only weights above a cutoff are sorted. All weights below the cutoff sum to at most half
        # of `(1 - share) * total`, the weight that lies past the end of the search: the result is never among them.
        share = sampling.top_p if sampling.top_p < 1 else u
        above = np.flatnonzero(weights > (1 - share) * total / (2 * weights.size))
        order = above[np.argsort(-weights[above], kind="stable")]
        ranked = weights[order]
    cumulative = np.cumsum(ranked)
    if sampling.top_p < 1:
        cumulative = cumulative[: int(np.searchsorted(cumulative, sampling.top_p * total, side="left")) + 1]
        total = float(cumulative[-1])
    # The sums may differ in the last bit, so the index is limited to kept tokens of nonzero weight.
    last = min(cumulative.size, int(np.count_nonzero(ranked))) - 1
    at = int(np.searchsorted(cumulative, u * total, side="right"))
    return int(order[min(at, last)])


def _order(values: Row, size: int) -> Ids:
    """Positions of the `size` largest values, largest first, ties by position."""
    if size * GROUP >= values.size:
        return np.argsort(-values, kind="stable")[:size]
    # `least` is the `size`-th largest maximum: at least `size` values reach it, so the `size` largest values do too.
    maxima = values[: values.size // GROUP * GROUP].reshape(GROUP, -1).max(axis=0)
    least = np.partition(maxima, maxima.size - size)[maxima.size - size]
    among = np.flatnonzero(values >= least)
    return among[np.argsort(-values[among], kind="stable")][:size]


def _reported(index: int, token_id: int, finish: Finish | None, raw: Row, top: int) -> Token:
    """A token with its log-probability and the `top` most probable alternatives, from raw logits."""
    peak = raw.max()
    logs = raw - (peak + np.log(np.exp(raw - peak).sum()))
    alternatives = tuple(Logprob(int(at), float(logs[at])) for at in (_order(logs, top) if top else ()))
    return Token(index, token_id, finish, float(logs[token_id]), alternatives)
