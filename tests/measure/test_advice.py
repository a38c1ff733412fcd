"""The rule of `hackkv eval --recommend`: hard to tell from exact KV, then fast, then small."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.canary import PresetRow
from hackkv.nodes import CodecLoss
from measure.accuracy.advice import HARD_TO_TELL, MAX_KL, MIN_TOP1, SAME_JCT, advice, hard_to_tell, ranked


def row(
    name: str, share: float, kl: float, top1: float = 0.97, ratio: float = 1.01, *, evicts: bool = False
) -> PresetRow:
    return PresetRow(name, share, CodecLoss(kl, top1, ratio, 1024), evicts)


EXACT = PresetRow("fp16", 1.0, None)
TABLE = (
    row("kvquant-2", 0.203, 0.1431, 0.844, 1.1415),
    row("rot-k2v2", 0.239, 0.0144, 0.969, 1.0243),
    row("rot-k4v4", 0.266, 0.0084, 0.961, 1.0123),
    row("fp8", 0.5, 0.0025, 0.981, 1.0029),
    EXACT,
)
"""A table from docs/accuracy.md."""
TIMES = {"kvquant-2": 7.6, "rot-k2v2": 7.0, "rot-k4v4": 6.9, "fp8": 7.4, "fp16": 7.7}


def names(rows: list[PresetRow]) -> list[str]:
    return [each.name for each in rows]


def test_what_stands_just_below_the_canarys_bound_is_no_advice() -> None:
    assert names(ranked(TABLE, TIMES)) == ["rot-k2v2", "rot-k4v4", "fp8", "fp16"]
    assert advice(TABLE, TIMES) == (
        f"rot-k2v2: of the presets that are hard to tell from exact KV ({HARD_TO_TELL}) and within 5% of the "
        "shortest JCT the smallest; next rot-k4v4, which holds 26.6% of FP16's bytes, not 23.9%"
    )
    assert names(ranked(TABLE, {**TIMES, "kvquant-2": 0.1})) == ["rot-k2v2", "rot-k4v4", "fp8", "fp16"]


def test_time_goes_before_bytes_where_it_can_be_felt() -> None:
    slower = {**TIMES, "rot-k2v2": 6.9 * SAME_JCT + 0.1}
    assert names(ranked(TABLE, slower))[0] == "rot-k4v4"
    assert advice(TABLE, slower).endswith("; next rot-k2v2, which takes 6% longer")
    quick = {**TIMES, "fp16": 1.0}
    assert names(ranked(TABLE, quick))[0] == "fp16", "bytes are worth nothing on a link that does not feel them"


@pytest.mark.parametrize(
    "bad",
    [
        row("kl", 0.1, math.nextafter(MAX_KL, 1)),
        row("first choices", 0.1, 0.001, top1=math.nextafter(MIN_TOP1, 0)),
        row("perplexity", 0.1, 0.001, ratio=1.031),
        row("no number", 0.1, math.nan),
        row("infinite", 0.1, math.inf, 0.0, math.inf),
    ],
    ids=lambda each: each.name,
)
def test_each_of_the_three_numbers_has_a_bound(bad: PresetRow) -> None:
    assert not hard_to_tell(bad)
    assert ranked((bad, EXACT), {bad.name: 1.0, "fp16": 9.0}) == [EXACT]


def test_bounds_belong_to_what_passes() -> None:
    assert hard_to_tell(row("edge", 0.1, MAX_KL, MIN_TOP1, 1.03))


def test_ties_go_to_the_one_that_loses_less() -> None:
    rows = (row("worse", 0.2, 0.02), row("better", 0.2, 0.0100))
    assert advice(rows, {"worse": 1.0, "better": 1.0}).endswith(
        "; next worse, as small, with a KL of 0.0200, not 0.0100"
    )
    same = (row("first", 0.2, 0.01), row("second", 0.2, 0.01))
    assert names(ranked(same, {"first": 1.0, "second": 1.0})) == ["first", "second"]


def test_who_asks_for_what_is_gone_nobody_knows() -> None:
    few = row("few", 0.05, 0.001, evicts=True)
    assert ranked((few, *TABLE), {**TIMES, "few": 0.1}) == ranked(TABLE, TIMES)


def test_none_passes() -> None:
    assert advice(TABLE[:1], TIMES) == f"none: no preset is hard to tell from exact KV ({HARD_TO_TELL})"
    only = f"fp16: the only preset that is hard to tell from exact KV ({HARD_TO_TELL})"
    assert advice((TABLE[0], EXACT), TIMES) == only


@given(st.lists(st.tuples(st.floats(0.05, 1), st.floats(0, 0.2), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_the_first_is_small_among_the_fast(measured: list[tuple[float, float, float]]) -> None:
    rows = [row(str(i), share, kl) for i, (share, kl, _) in enumerate(measured)]
    jct_s = {str(i): seconds for i, (_, _, seconds) in enumerate(measured)}
    order = ranked(rows, jct_s)
    assert sorted(names(order)) == sorted(each.name for each in rows if hard_to_tell(each))
    if order:
        shortest = min(jct_s[each.name] for each in order)
        assert jct_s[order[0].name] <= SAME_JCT * shortest
        assert not any(each.share < order[0].share and jct_s[each.name] <= SAME_JCT * shortest for each in order)
