"""The stages of a request sum to its total at every moment, whatever the workers report."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.timing import Stage, StageClock, SubStage
from tests.hand import Hand

SECONDS = st.floats(0, 1e4)
SHARE = st.floats(0, 1)
STAGES = st.sampled_from(list(Stage))
MEASURED = st.dictionaries(STAGES, SECONDS, max_size=4)


@given(
    st.lists(st.tuples(SECONDS, STAGES, MEASURED, st.none() | STAGES), max_size=12), SECONDS, st.none() | st.just(3.0)
)
def test_stages_sum_to_the_total_at_every_moment(
    windows: list[tuple[float, Stage, dict[Stage, float], Stage | None]], last: float, start: float | None
) -> None:
    """This holds in the middle of a window, for durations longer than their window, and for a start in the past."""
    hand = Hand()
    clock = StageClock(hand, start)
    for seconds, stage, measured, rest in windows:
        hand.time += seconds
        assert sum(clock.stages().values()) == pytest.approx(clock.total_s)
        clock.enter(stage, measured, rest)
        assert sum(clock.stages().values()) == pytest.approx(clock.total_s)
    hand.time += last
    assert sum(clock.stages().values()) == pytest.approx(clock.total_s)
    assert all(seconds >= 0 for seconds in clock.stages().values())


@given(st.lists(st.tuples(SECONDS, STAGES, MEASURED), min_size=2, max_size=8))
def test_a_stage_never_shrinks(windows: list[tuple[float, Stage, dict[Stage, float]]]) -> None:
    hand = Hand()
    clock = StageClock(hand)
    seen = []
    for seconds, stage, measured in windows:
        hand.time += seconds
        clock.enter(stage, measured)
        seen.append(clock.stages())
    assert all(later[stage] >= earlier[stage] for earlier, later in pairwise(seen) for stage in Stage)


def test_a_window_is_credited_to_what_was_measured_and_the_rest_to_its_stage() -> None:
    hand = Hand()
    clock = StageClock(hand)
    hand.time += 1
    clock.enter(Stage.PREFILL)
    hand.time += 10
    clock.enter(Stage.DECODE, {Stage.PREFILL_QUEUE: 2, Stage.PREFILL: 5})
    hand.time += 4
    clock.enter(Stage.STREAM, {Stage.DECODE: 1}, rest=Stage.TRANSFER)
    spent = {stage: seconds for stage, seconds in clock.stages().items() if seconds}
    assert spent == {
        Stage.ROUTER_QUEUE: 1,
        Stage.PREFILL_QUEUE: 2,
        Stage.PREFILL: 8,
        Stage.TRANSFER: 3,
        Stage.DECODE: 1,
    }


def test_durations_longer_than_the_window_are_scaled_to_it() -> None:
    hand = Hand()
    clock = StageClock(hand)
    hand.time += 3
    clock.enter(Stage.STREAM, {Stage.PREFILL: 4, Stage.DECODE: 2})
    assert (clock.stages()[Stage.PREFILL], clock.stages()[Stage.DECODE]) == (2, 1)


def test_parts_are_scaled_as_the_stage_they_lie_in() -> None:
    """The decode node spent most of its 6 s before the window opened, because token 0 came late from the other node."""
    hand = Hand()
    clock = StageClock(hand)
    hand.time += 4
    clock.enter(
        Stage.STREAM, {Stage.TRANSFER: 2, Stage.DECODE: 6}, parts={SubStage.ATTEND: 5, SubStage.APPROXIMATION: 1}
    )
    assert (clock.stages()[Stage.TRANSFER], clock.stages()[Stage.DECODE]) == (1, 3)
    assert (clock.sub_stages[SubStage.ATTEND], clock.sub_stages[SubStage.APPROXIMATION]) == (2.5, 0.5)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SHARE, SHARE), max_size=8))
def test_a_part_never_exceeds_what_it_lies_in(windows: list[tuple[float, float, float, float, float]]) -> None:
    """This holds for any length of a window, if the times that workers report are consistent."""
    hand = Hand()
    clock = StageClock(hand)
    for seconds, transfer, decode, attended, approximated in windows:
        hand.time += seconds
        attend = decode * attended
        parts = {SubStage.ATTEND: attend, SubStage.APPROXIMATION: attend * approximated}
        clock.enter(Stage.STREAM, {Stage.TRANSFER: transfer, Stage.DECODE: decode}, parts=parts)
        spent = clock.sub_stages
        assert spent[SubStage.APPROXIMATION] <= spent[SubStage.ATTEND] <= clock.stages()[Stage.DECODE]


def test_a_stopped_clock_gives_no_more_time_to_any_stage() -> None:
    hand = Hand()
    clock = StageClock(hand)
    hand.time += 3
    clock.stop()
    hand.time += 5
    clock.stop()
    clock.enter(Stage.STREAM, {Stage.PREFILL: 1})
    assert clock.total_s == sum(clock.stages().values()) == 3
    assert clock.stages()[Stage.PREFILL] == 1
