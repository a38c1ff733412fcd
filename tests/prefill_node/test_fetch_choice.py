"""The choice between fetching and computing, by measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.wire_choice import Rate
from prefill_node.fetch_choice import (
    ASSUMED_WAIT_S,
    BELIEVED_S,
    ENOUGH_BYTES,
    FIRST_STRETCH,
    MOST_PEERS,
    REMEMBERED_TOKENS,
    Estimate,
    FetchSpeed,
    PassSpeed,
    PrefixFetch,
)

SECONDS = st.floats(1e-6, 1e3)
NOTHING = Rate()


@given(fetch_s=SECONDS, compute_s=SECONDS, most_s=SECONDS)
def test_auto_takes_the_faster_way_and_waits_no_longer_than_both(
    fetch_s: float, compute_s: float, most_s: float
) -> None:
    estimate = Estimate(fetch_s, compute_s)
    assert estimate.chosen(PrefixFetch.AUTO) == (fetch_s < compute_s)
    assert estimate.chosen(PrefixFetch.ALWAYS)
    assert not estimate.chosen(PrefixFetch.NEVER)
    assert estimate.patience_s(PrefixFetch.AUTO, most_s) == min(most_s, fetch_s + compute_s)
    assert estimate.patience_s(PrefixFetch.ALWAYS, most_s) == most_s


def test_passes_that_were_not_measured_are_assumed() -> None:
    assert PassSpeed(100.0).seconds(50, 250) == pytest.approx(2.0)


@given(
    rate=st.floats(1.0, 1e6),
    chunks=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 1000)), min_size=1, max_size=9),
    first=st.integers(0, 10_000),
    count=st.integers(0, 10_000),
)
def test_a_node_of_one_speed_is_measured_wherever_it_ran(
    rate: float, chunks: list[tuple[int, int]], first: int, count: int
) -> None:
    speed = PassSpeed(1.0)
    for chunk in chunks:
        speed.ran([chunk], chunk[1] / rate)
    assert speed.seconds(first, first + count) == pytest.approx(count / rate)


def test_stretches_of_a_prompt_have_speeds_of_their_own() -> None:
    """Tokens far into a prompt take longer. An unmeasured stretch has the speed of its neighbour; of two, the later."""
    speed = PassSpeed(1.0)
    speed.ran([(0, 100)], 1.0)
    speed.ran([(2 * FIRST_STRETCH, 100)], 4.0)
    assert speed.seconds(0, 100) == pytest.approx(1.0)
    assert speed.seconds(FIRST_STRETCH - 100, FIRST_STRETCH + 100) == pytest.approx(1.0 + 4.0)
    assert speed.seconds(100 * FIRST_STRETCH, 100 * FIRST_STRETCH + 100) == pytest.approx(4.0)


def test_the_chunks_of_a_pass_share_its_time_by_their_tokens() -> None:
    speed = PassSpeed(1.0)
    speed.ran([(0, 30), (4 * FIRST_STRETCH, 10)], 4.0)
    assert speed.seconds(0, 30) == pytest.approx(3.0)
    assert speed.seconds(4 * FIRST_STRETCH, 4 * FIRST_STRETCH + 10) == pytest.approx(1.0)


def test_old_passes_are_forgotten_and_few_tokens_say_little() -> None:
    speed = PassSpeed(1.0)
    speed.ran([(0, FIRST_STRETCH)], 1.0)
    speed.ran([(0, 1)], 1.0)
    assert speed.seconds(0, FIRST_STRETCH) == pytest.approx(2.0, rel=0.01)
    for _ in range(10 * REMEMBERED_TOKENS // FIRST_STRETCH):
        speed.ran([(0, FIRST_STRETCH)], 3.0)
    assert speed.seconds(0, FIRST_STRETCH) == pytest.approx(3.0, rel=0.01)


def test_a_link_is_assumed_until_something_has_passed_it() -> None:
    speed, pushes = FetchSpeed(1e6), Rate()
    assert speed.seconds("a", 10**6, pushes, 0.0) == pytest.approx(ASSUMED_WAIT_S + 1.0)
    pushes.add(2e6, 1.0)
    assert speed.seconds("a", 10**6, pushes, 0.0) == pytest.approx(ASSUMED_WAIT_S + 0.5)
    speed.fetched("a", 4 * 10**6, 0.25, 1.0, now=0.0)
    assert speed.seconds("a", 10**6, pushes, 1.0) == pytest.approx(0.25 + 0.25)
    assert speed.seconds("b", 10**6, NOTHING, 1.0) == pytest.approx(ASSUMED_WAIT_S + 1.0)


def test_a_small_fetch_measures_how_far_away_its_lender_is() -> None:
    speed = FetchSpeed(1e6)
    speed.fetched("a", ENOUGH_BYTES - 1, 0.5, 10.0, now=0.0)
    assert speed.seconds("a", 10**6, NOTHING, 0.0) == pytest.approx(0.5 + 1.0)


def test_a_fetch_that_was_given_up_measures_its_link_however_little_came() -> None:
    """Otherwise a node would try a slow link again and again."""
    speed = FetchSpeed(1e6)
    speed.gave_up("a", 1000, 10.0, now=0.0)
    assert speed.seconds("a", 1000, NOTHING, 0.0) == pytest.approx(ASSUMED_WAIT_S + 10.0)
    speed.gave_up("b", 0, 10.0, now=0.0)
    assert speed.seconds("b", 1000, NOTHING, 0.0) == pytest.approx(ASSUMED_WAIT_S + 10_000.0)


def test_what_fetches_measured_is_believed_for_a_while() -> None:
    """Otherwise a node that once found a link slow would never find out that it has become fast."""
    speed = FetchSpeed(1e6)
    speed.fetched("a", 10**6, 5.0, 100.0, now=0.0)
    assert speed.seconds("a", 10**6, NOTHING, BELIEVED_S) == pytest.approx(105.0)
    assert speed.seconds("a", 10**6, NOTHING, BELIEVED_S + 1) == pytest.approx(ASSUMED_WAIT_S + 1.0)
    speed.fetched("a", 10**6, 0.5, 2.0, now=BELIEVED_S + 1)
    assert speed.seconds("a", 10**6, NOTHING, BELIEVED_S + 1) == pytest.approx(2.5)


def test_so_many_peers_are_remembered() -> None:
    speed = FetchSpeed(1e6)
    for number in range(MOST_PEERS + 1):
        speed.fetched(str(number), 0, 1.0, 1.0, now=0.0)
    assert speed.seconds("0", 0, NOTHING, 0.0) == pytest.approx(ASSUMED_WAIT_S)
    assert speed.seconds("1", 0, NOTHING, 0.0) == pytest.approx(1.0)
