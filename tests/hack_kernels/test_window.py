"""The window: its exact pages, each of which has a place in the slot."""

from __future__ import annotations

import itertools

import pytest
import torch
from hack_kernels.window import MOST_EXACT, MOST_RECENT, MOST_SINKS, Window
from hypothesis import given
from hypothesis import strategies as st

PI = 32
WINDOWS = [
    Window(sink, recent)
    for sink, recent in itertools.product(range(MOST_SINKS + 1), range(MOST_RECENT + 1))
    if sink + recent <= MOST_EXACT
]
windows = st.sampled_from(WINDOWS)


@given(window=windows, page=st.integers(0, 99))
def test_every_page_is_seen_once_as_the_words_say(window: Window, page: int) -> None:
    exact = {g for g in range(page) if g < window.sink or g >= page - window.recent}
    assert window.earlier(page) == tuple(sorted(exact))
    assert list(window.coded(page)) == [g for g in range(page) if g not in exact]


@given(window=windows, page=st.integers(0, 99))
def test_exact_pages_have_places_of_their_own(window: Window, page: int) -> None:
    """So has the query's own page. The page that enters next takes the place of one that no query sees any more."""
    places = [window.place(g) for g in (*window.earlier(page), page)]
    assert len(set(places)) == len(places)
    assert set(places) <= set(range(window.pages))
    assert window.place(page + 1) not in {window.place(g) for g in window.earlier(page + 1)}


@given(window=windows, rows=st.integers(0, 20 * PI))
def test_runs_are_the_places_of_exact_rows_in_order(window: Window, rows: int) -> None:
    page = rows // PI
    numbers = [row for g in (*window.earlier(page), page) for row in range(g * PI, min((g + 1) * PI, rows))]
    runs = window.runs(rows, PI)
    assert all(run.start < run.stop for run in runs)
    assert [at for run in runs for at in range(run.start, run.stop)] == window.at(torch.tensor(numbers), PI).tolist()
    assert window.exact_rows(rows, PI) == len(numbers)


@given(window=windows, rows=st.integers(0, 20 * PI), first=st.integers(0, 21))
def test_exact_rows_are_those_of_the_runs(window: Window, rows: int, first: int) -> None:
    runs = window.runs(rows, PI, first)
    assert window.exact_rows(rows, PI, first) == sum(run.stop - run.start for run in runs)


def test_without_sinks_and_recent_pages_a_slot_is_the_open_page() -> None:
    assert [Window().place(page) for page in range(5)] == [0] * 5
    assert Window().runs(2 * PI + 5, PI) == (slice(0, 5),)
    assert Window().runs(2 * PI, PI) == ()


@pytest.mark.parametrize(
    ("sink", "recent", "said"),
    [(3, 0, "sink is 3"), (0, 3, "recent is 3"), (-1, 0, "sink is -1"), (2, 2, "sink [+] recent is 4")],
)
def test_a_window_that_is_too_large_is_named(sink: int, recent: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Window(sink, recent)
