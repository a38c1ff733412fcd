"""Choosing the next token of a sequence from its logits: the definition, in numpy on the host.

For one row of logits, in float64:

    ids that `allowed` leaves out = -inf;  logits += bias
    barred ids = -inf for the first `barred_until` tokens, unless that leaves no id
    repetition:  logit /= r if it is positive, *= r if not, for every id of prompt or output
    logits -= frequency * (times in output) + presence * (in output)
    temperature 0: the first id in order
    else keep the first `top_k` ids in order, then those of weight >= min_p * 2^42, then the shortest prefix whose
    weights sum to at least `top_p` of the kept weights' sum; draw

*Order* is by logit, largest first, ties by id. The *weight* of an id is the integer nearest to 2^42 exp(x), ties to
even, with x = (logit - largest) / temperature. Sums of weights are sums of integers, the same in every order of adding.
So backends may add as they like, and a replay elsewhere chooses the same token. An id that is 2^43 times less probable
than the most probable one has weight 0 and is never drawn. `exponential` fixes exp to the bit.

The draw for output token i takes one uniform number u, Philox(key = seed, counter = i). It chooses the first kept id in
order such that the weights up to this id, its own included, sum to more than u times the sum of all kept weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

Row: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = tuple[float, list[tuple[int, float]]]
"""The natural-log probability of an id, and the most probable ids with their log-probabilities."""

NOT_FINITE: Final = -1
"""Instead of an id: the row holds NaN, or its largest logit is infinite."""
FAULTY: Final = -2
"""Instead of an id: the row is set in `faulty`."""
NONE_ALLOWED: Final = -3
"""Instead of an id: after all rules no id has a logit above -inf."""

WEIGHT_BITS: Final = 42
"""The weight of the most probable id is 2 to this power."""
MOST_IDS: Final = 2**20
"""The largest vocabulary: sums of weights stay below 2^63."""
MOST_ADDED: Final = 1e30
"""Bias and penalties are at most this large, so that no rule makes a logit infinite."""
MOST_FACTOR: Final = 1e6
"""The penalty for repetition lies between 1 / this and this, for the same reason."""

LOG2_E: Final = 1.4426950408889634
LN2_HIGH: Final = float.fromhex("0x1.62e42feep-1")
"""ln 2 to 32 bits: its products with small integers are exact."""
LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
"""The rest of ln 2."""
TERMS: Final = 12
"""Terms of the series of exp, beside the first."""
LOWEST: Final = -40.0
"""Exponents below this one are raised to it. Their weight is 0."""


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """How the next token of one sequence is chosen. Raises `ValueError` naming a field that no choice can follow."""

    seed: int
    """0 .. 2^64 - 1."""
    temperature: float
    """0: the most probable id."""
    top_p: float = 1.0
    """1 or more keeps all ids."""
    top_k: int = 0
    """0 keeps all ids."""
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """(id, number that is added to its logit). Ids beyond the vocabulary are ignored, here and below."""
    barred: tuple[int, ...] = ()
    """Ids that none of the first `barred_until` tokens may be."""
    barred_until: int = 0

    @property
    def foresees(self) -> bool:
        """Whether a choice depends only on how many tokens came before it, not on which tokens they were."""
        return self.repetition == 1.0 and not (self.frequency or self.presence)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it has 64 bits")
        ranges = {
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 <= self.top_p < math.inf,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p <= 1,
            "presence": abs(self.presence) <= MOST_ADDED,
            "frequency": abs(self.frequency) <= MOST_ADDED,
            "repetition": 1 / MOST_FACTOR <= self.repetition <= MOST_FACTOR,
        }
        for name, inside in ranges.items():
            if not inside:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not all(abs(value) <= MOST_ADDED for _, value in self.bias):
            raise ValueError(f"bias has a value that is not within {MOST_ADDED:g}")
        for name, ids in (("bias", [at for at, _ in self.bias]), ("barred", self.barred)):
            if any(token_id < 0 for token_id in ids):
                raise ValueError(f"{name} has a negative id")


class Chooser(Protocol):
    """The rules of one sequence, and what they need to know of its tokens so far.

    A chooser is given only to the kernels that made it.
    """

    def append(self, token_id: int) -> None:
        """Tell the chooser that the sequence's output continues with this token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceInput:
    """The input of a choice: the next ids of a batch are chosen from it."""

    logits: Tensor
    """[B, n]"""
    choosers: Sequence[Chooser]
    """[B], made by the kernels that choose. No choice changes one."""
    faulty: Tensor | None = None
    """[B] bool: rows that get `FAULTY` for an id."""
    allowed: Tensor | None = None
    """[B, ceil(n / 32)] int32: bit i of word w says whether id 32 w + i may be chosen. A row of -1 allows all ids."""


@dataclass(frozen=True, slots=True)
class ChosenIds:
    """The next ids of a batch, which the device may still have to find."""

    there: Tensor
    """[B] int64 on the device of the logits."""
    ids: Callable[[], list[int]]
    """The ids on the host. The call waits for them."""


class ChoiceKernels(Protocol):
    """A backend's operations on logits."""

    def new_chooser(self, rules: ChoiceRules, prompt_ids: Sequence[int]) -> Chooser:
        """A new chooser of these kernels for a sequence with this prompt."""
        ...

    def choose(self, given: ChoiceInput) -> list[int]:
        """The next id of each row, as this module defines it; waits for the device.

        Where a row has no next id the result is `NOT_FINITE`, `NONE_ALLOWED` or `FAULTY`. Raises `ValueError`.
        """
        ...

    def choosing(self, given: ChoiceInput, *, later: bool = False) -> ChosenIds:
        """`choose`, except that the ids need not be there when the call returns.

        With `later` the choosers lack the latest token. All rules must foresee (`ChoiceRules.foresees`): they need only
        the number of that token.
        """
        ...

    def score(self, logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[Scores]:
        """Log-probabilities under each row of logits [B, n]: of ids[b], and of the tops[b] most probable ids.

        Waits for the device. A row that holds NaN, or whose largest logit is infinite, gets NaN and no ids. Raises
        `ValueError`.
        """
        ...


class NumpyChooser:
    """Implements `Chooser` for `choose` of this module."""

    __slots__ = ("counts", "emitted", "known", "rules")

    def __init__(self, rules: ChoiceRules, prompt_ids: Iterable[int]) -> None:
        self.rules = rules
        self.known = set(prompt_ids) if rules.repetition != 1.0 else set[int]()
        """Ids of prompt and output, if there is a penalty for repetition."""
        self.counts = Counter[int]()
        """Times of each id in the output."""
        self.emitted = 0

    def one_later(self) -> NumpyChooser:
        """A copy for the choice after the next one. The rules must foresee."""
        later = copy(self)
        later.emitted += 1
        return later

    def append(self, token_id: int) -> None:
        """Count the token."""
        self.emitted += 1
        self.counts[token_id] += 1
        if self.rules.repetition != 1.0:
            self.known.add(token_id)


def choose(given: ChoiceInput) -> list[int]:
    """See `ChoiceKernels.choose`; choosers are `NumpyChooser`s. The host waits once."""
    check_vocabulary(given.logits)
    rows, choosers = given.logits.double().cpu().numpy(), cast(Sequence[NumpyChooser], given.choosers)
    flags = np.zeros(len(rows), dtype=bool) if given.faulty is None else given.faulty.cpu().numpy()
    masks = None if given.allowed is None else unpacked(given.allowed, rows.shape[1])
    return [
        FAULTY if flags[at] else next_id(row, choosers[at], None if masks is None else masks[at])
        for at, row in enumerate(rows)
    ]


def check_vocabulary(logits: Tensor) -> None:
    """Raise `ValueError` if sums of weights could overflow."""
    if logits.shape[-1] > MOST_IDS:
        raise ValueError(f"logits have {logits.shape[-1]} columns; at most {MOST_IDS} can be weighed")


def unpacked(allowed: Tensor, size: int) -> npt.NDArray[np.bool_]:
    """[B, size] of `allowed` [B, words] int32: bit i of word w is id 32 w + i."""
    bits = np.unpackbits(allowed.cpu().contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    return bits[:, :size].astype(bool)


def next_id(logits: Row, chooser: NumpyChooser, allowed: npt.NDArray[np.bool_] | None = None) -> int:
    """The next id of a row of logits [n], or `NOT_FINITE` or `NONE_ALLOWED`."""
    if not math.isfinite(logits.max()):  # NaN is the largest of a row that holds it
        return NOT_FINITE
    row, rules = adjusted(logits, chooser, allowed), chooser.rules
    if row.max() == -math.inf:
        return NONE_ALLOWED
    if rules.temperature == 0:
        return int(row.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature
        return drawn(row, rules, uniform(rules.seed, chooser.emitted))


def adjusted(logits: Row, chooser: NumpyChooser, allowed: npt.NDArray[np.bool_] | None) -> Row:
    """A copy of `logits` [n] after the mask, bias, barred ids and penalties."""
    rules = chooser.rules
    row = logits.copy() if allowed is None else np.where(allowed, logits, -math.inf)
    for token_id, bias in rules.bias:
        if token_id < row.size:
            row[token_id] += bias
    if chooser.emitted < rules.barred_until:
        barred = _inside(rules.barred, row)
        before = row[barred]
        row[barred] = -math.inf
        if row.max() == -math.inf:
            row[barred] = before
    if rules.repetition != 1.0:
        known = _inside(chooser.known, row)
        row[known] = np.where(row[known] > 0, row[known] / rules.repetition, row[known] * rules.repetition)
    if rules.frequency or rules.presence:
        seen = _inside(chooser.counts, row)
        times = np.array([chooser.counts[token_id] for token_id in seen.tolist()], dtype=np.float64)
        row[seen] -= rules.frequency * times + rules.presence
    return row


def _inside(ids: Iterable[int], row: Row) -> Ids:
    return np.array([token_id for token_id in ids if token_id < row.size], dtype=np.int64)


def drawn(row: Row, rules: ChoiceRules, u: float) -> int:
    """The id that `u` in [0, 1) selects from adjusted logits [n]. At least one logit must be finite."""
    order = in_order(row, rules.top_k)
    weight = weights((row[order] - row.max()) / rules.temperature)
    kept = weight >= max(1.0, rules.min_p * 2.0**WEIGHT_BITS)
    order, sums = order[kept], np.cumsum(weight[kept])
    if rules.top_p < 1:
        sums = sums[: _reach(sums, math.ceil(rules.top_p * float(sums[-1]))) + 1]
    return int(order[_reach(sums, math.floor(u * float(sums[-1])) + 1)])


def _reach(sums: Ids, target: int) -> int:
    """The first index whose sum is at least `target`. Rounding may have put `target` beyond the last sum."""
    return int(np.searchsorted(sums, min(target, int(sums[-1])), side="left"))


def in_order(row: Row, size: int = 0) -> Ids:
    """The first `size` ids in order; all ids if `size` is 0."""
    return np.argsort(-row, kind="stable")[: size or None]


def weights(x: Row) -> Ids:
    """The weight of each exponent x <= 0."""
    return np.rint(exponential(x, WEIGHT_BITS)).astype(np.int64)


def exponential(x: Row, power: int) -> Row:
    """2^power exp(x) for x <= 0, defined to the bit: e^x = 2^k e^r, and e^r by its series, without fused operations."""
    x = np.maximum(x, LOWEST)
    k = np.rint(x * LOG2_E)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    y = np.full_like(x, 1 / math.factorial(TERMS))
    for term in range(TERMS - 1, -1, -1):
        y = y * r + 1 / math.factorial(term)
    return np.ldexp(y, k.astype(np.int64) + power)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides output token `index` of a sequence with this seed."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def score(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[Scores]:
    """Log-probabilities under `logits` [B, n] as they are; `RowKernels.score` describes the arguments."""
    check_vocabulary(logits)
    rows = logits.double().cpu().numpy()
    return [_score(row, token_id, top) for row, token_id, top in zip(rows, ids, tops, strict=True)]


def _score(row: Row, token_id: int, top: int) -> Scores:
    if not math.isfinite(row.max()):
        return math.nan, []
    total = row.max() + math.log(math.ldexp(int(weights(row - row.max()).sum()), -WEIGHT_BITS))
    best = in_order(row, top) if top else ()
    return float(row[token_id] - total), [(int(at), float(row[at] - total)) for at in best]
