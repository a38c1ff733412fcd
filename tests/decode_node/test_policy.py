"""Victims are young, and the oldest is never one. Chunks of a replay end at page boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.policy import SOON, SwapCandidate, pick_victim, replay_rows

CANDIDATES = st.lists(
    st.builds(SwapCandidate, order=st.integers(0, 50), pages=st.integers(0, 3), left=st.integers(1, 3 * SOON)),
    unique_by=lambda candidate: candidate.order,
)


@given(CANDIDATES)
def test_the_victim_is_the_youngest_that_is_worth_it(candidates: list[SwapCandidate]) -> None:
    chosen = pick_victim(candidates)
    able = [it for it in candidates if it.pages and it.order != min(other.order for other in candidates)]
    if chosen is None:
        assert not able
        return
    victim = candidates[chosen]
    assert victim in able
    if victim.left > SOON:
        assert all(it.left <= SOON for it in able if it.order > victim.order)
    else:
        assert all(it.left <= SOON and it.order <= victim.order for it in able)


@given(st.integers(0, 200), st.integers(1, 300), st.integers(8, 64), st.sampled_from([4, 8]), st.booleans())
def test_chunks_cover_a_replay_and_none_crosses_a_page_that_it_did_not_begin(
    start: int, rows: int, budget: int, page_tokens: int, by_page: bool
) -> None:
    end = start + rows
    while start < end:
        count = replay_rows(start, end - start, budget, page_tokens, by_page=by_page)
        assert 0 < count <= min(budget, end - start)
        if start % page_tokens or by_page:
            assert (start + count - 1) // page_tokens == start // page_tokens
        start += count
