"""Choosing tokens on the device of the logits: `choosing` in torch, to the bit. The host waits once a call.

Rows are computed together. Settings that differ from row to row are numbers in a column, or entries (row, id, value) of
a list that the host makes from rules and tokens. So the operators of a call depend on which rules occur, not on
lengths.

Every product and every sum is an operator of its own, so no device can fuse them into another rounding. Sums of weights
are sums of integers. Ties: `sort` is stable and `argmax` takes the first. -0 becomes 0 first, because some sorts
compare bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from hack_kernels.choosing import (
    FAULTY,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    NONE_ALLOWED,
    NOT_FINITE,
    TERMS,
    WEIGHT_BITS,
    ChoiceInput,
    ChosenIds,
    NumpyChooser,
    Scores,
    check_vocabulary,
    uniform,
)
from hack_kernels.rowwise import Rowwise

FP64_BIAS, FP64_MANTISSA_BITS = 1023, 52
VALUE: Final = 2
Entry = tuple[int, int, float]
"""Row, id, and the value that a rule applies to this logit."""

_Of = Callable[[NumpyChooser], Iterable[tuple[int, float]]]


class DeviceRows(Rowwise):
    """`Rowwise` with choices and scores computed on the device of the logits. Choosers stay in host memory."""

    def choose(self, given: ChoiceInput) -> list[int]:
        """The next ids, computed in torch. Only the ids come back to the host."""
        return self.choosing(given).ids()

    def choosing(self, given: ChoiceInput, *, later: bool = False) -> ChosenIds:
        """The ids are on their way when the call returns, and work that is enqueued later does not hold them up."""
        mine = cast(Sequence[NumpyChooser], given.choosers)
        chosen = self._chosen(given, [each.one_later() for each in mine] if later else mine)
        return ChosenIds(chosen, self.later(chosen))

    def later(self, found: Tensor) -> Callable[[], list[Any]]:
        """`back` as a function. A call of it waits only for the work that the device has been given so far."""
        if found.device.type != "cuda":
            return partial(self.back, found)
        here = found.to("cpu", non_blocking=True)  # pinned
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(found.device))

        def wait() -> list[Any]:
            there.synchronize()
            values: list[Any] = here.tolist()
            return values

        return wait

    def _chosen(self, given: ChoiceInput, choosers: Sequence[NumpyChooser]) -> Tensor:
        check_vocabulary(given.logits)
        x = given.logits.double() + 0.0
        broken = ~torch.isfinite(x.amax(dim=1))
        x = adjusted(x, choosers, given.allowed)
        chosen = x.argmax(dim=1)
        drawn = [row for row, chooser in enumerate(choosers) if chooser.rules.temperature]
        if drawn:
            rows = brought(drawn, x.device)
            chosen = chosen.index_put((rows,), drawn_ids(x[rows], [choosers[row] for row in drawn]))
        chosen = chosen.masked_fill(x.amax(dim=1) == -torch.inf, NONE_ALLOWED).masked_fill(broken, NOT_FINITE)
        return chosen if given.faulty is None else chosen.masked_fill(given.faulty, FAULTY)

    def back(self, found: Tensor) -> list[Any]:
        """`found` in host memory, as lists. No other method waits for the device."""
        values: list[Any] = found.tolist()
        return values

    def score(self, logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[Scores]:
        """Scores computed in torch, except for the logarithm of a row's sum, which the host computes."""
        check_vocabulary(logits)
        x, most = logits.double() + 0.0, min(max(tops, default=0), logits.shape[1])
        top = x.amax(dim=1, keepdim=True)
        best, order = x.sort(dim=1, descending=True, stable=True)
        columns = (top, weights(x - top).sum(dim=1, keepdim=True), x.gather(1, _column(ids, x)), best[:, :most])
        found = self.back(torch.cat((*columns, order[:, :most]), dim=1))
        return [_scores(row, most, asked) for row, asked in zip(found, tops, strict=True)]


def brought(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor on `device`. A copy from memory that is not pinned would wait for the device."""
    here = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def adjusted(x: Tensor, choosers: Sequence[NumpyChooser], allowed: Tensor | None) -> Tensor:
    """Logits [B, n] FP64 after the mask, bias, barred ids and penalties."""
    size = x.shape[1]
    if allowed is not None:
        ids = torch.arange(size, device=x.device)
        bits = allowed.index_select(1, ids // 32) >> (ids % 32) & 1
        x = x.masked_fill(bits == 0, -torch.inf)
    left = entries(choosers, size, lambda each: each.rules.bias)
    while left:  # one round, unless a request names an id twice; its values are then added in their order
        first = {entry[:2]: entry for entry in reversed(left)}
        x = _at(x, list(first.values()), torch.add)
        left = [entry for entry in left if first[entry[:2]] is not entry]
    barred = entries(choosers, size, _barred)
    if barred:
        without = _at(x, barred, lambda before, never: never)
        x = torch.where((without.amax(dim=1) == -torch.inf)[:, None], x, without)
    x = _at(x, entries(choosers, size, _repeated), lambda before, by: torch.where(before > 0, before / by, before * by))
    return _at(x, entries(choosers, size, _counted), torch.sub)


def _barred(chooser: NumpyChooser) -> Iterable[tuple[int, float]]:
    rules = chooser.rules
    return ((token_id, -math.inf) for token_id in rules.barred if chooser.emitted < rules.barred_until)


def _repeated(chooser: NumpyChooser) -> Iterable[tuple[int, float]]:
    by = chooser.rules.repetition
    return ((token_id, by) for token_id in chooser.known if by != 1.0)


def _counted(chooser: NumpyChooser) -> Iterable[tuple[int, float]]:
    rules = chooser.rules
    if not (rules.frequency or rules.presence):
        return ()
    return ((token_id, rules.frequency * times + rules.presence) for token_id, times in chooser.counts.items())


def entries(choosers: Sequence[NumpyChooser], size: int, of: _Of) -> list[Entry]:
    """The entries that `of` gives for each row, for ids of the vocabulary."""
    return [
        (row, token_id, value)
        for row, chooser in enumerate(choosers)
        for token_id, value in of(chooser)
        if token_id < size
    ]


def _at(x: Tensor, places: Sequence[Entry], then: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`x` with then(old value, value of the entry) at each of `places`."""
    if not places:
        return x
    rows, ids = brought([entry[:VALUE] for entry in places], x.device).unbind(1)
    values = brought([entry[VALUE] for entry in places], x.device, torch.float64)
    return x.index_put((rows, ids), then(x[rows, ids], values))


def drawn_ids(x: Tensor, choosers: Sequence[NumpyChooser]) -> Tensor:
    """The ids [B] that the rows' uniform numbers select from adjusted logits [B, n]."""
    each = [(chooser.rules, uniform(chooser.rules.seed, chooser.emitted)) for chooser in choosers]
    columns = [
        (
            rules.temperature,
            max(1.0, rules.min_p * 2.0**WEIGHT_BITS),
            rules.top_k or x.shape[1],
            rules.top_p if rules.top_p < 1 else math.inf,
            u,
        )
        for rules, u in each
    ]
    temperature, least, most, share, u = brought(columns, x.device, torch.float64).T[..., None]
    values, order = x.sort(dim=1, descending=True, stable=True)
    weight = weights((values - values[:, :1]) / temperature)
    kept = (weight >= least) & (torch.arange(x.shape[1], device=x.device) < most)
    sums = weight.masked_fill(~kept, 0).cumsum(dim=1)
    total = sums[:, -1:]
    # A share of 1 or more, which is infinity here, takes the total: a product with infinity does not fit an integer.
    part = torch.where(share.isinf(), total, (share.nan_to_num(posinf=0.0) * total).ceil().long())
    limit = sums.gather(1, _reach(sums, torch.minimum(part, total)))
    target = torch.minimum((u * limit).floor().long() + 1, limit)
    return order.gather(1, _reach(sums, target))[:, 0]


def _reach(sums: Tensor, target: Tensor) -> Tensor:
    """[B, 1]: the first index of each row whose sum is at least its target; the last one if there is none."""
    return torch.searchsorted(sums, target).clamp(max=sums.shape[1] - 1)


def weights(x: Tensor) -> Tensor:
    """`choosing.weights` of exponents <= 0, int64. NaN, as in rows without a choice, has weight 0."""
    x = x.nan_to_num(nan=LOWEST).clamp(min=LOWEST)
    k = (x * LOG2_E).round()
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    y = torch.full_like(x, 1 / math.factorial(TERMS))
    for term in range(TERMS - 1, -1, -1):
        y = y * r + 1 / math.factorial(term)
    power = (k.long() + (WEIGHT_BITS + FP64_BIAS)) << FP64_MANTISSA_BITS
    return (y * power.view(torch.float64)).round().long()


def _column(ids: Sequence[int], x: Tensor) -> Tensor:
    return brought(ids, x.device, torch.int64)[:, None]


def _scores(row: list[float], most: int, asked: int) -> Scores:
    """Scores of one row: [its largest logit, the sum of its weights, the id's logit, best logits, ids of these]."""
    top, weight, value, best, order = row[0], row[1], row[2], row[3 : 3 + most], row[3 + most :]
    if not math.isfinite(top):
        return math.nan, []
    total = top + math.log(math.ldexp(weight, -WEIGHT_BITS))
    return value - total, [(int(at), each - total) for at, each in zip(order[:asked], best[:asked], strict=True)]
