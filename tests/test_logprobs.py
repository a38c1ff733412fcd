"""Columns of log-probabilities have the values of the tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hackkv.logprobs import PromptLogprobs, Scores

LOGPROB = st.floats(allow_nan=False)
ALIKE = st.integers(0, 3).flatmap(
    lambda width: st.lists(
        st.tuples(LOGPROB, st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROB), min_size=width, max_size=width)),
        max_size=9,
    )
)


@given(ALIKE, st.data())
def test_tokens_come_back_and_a_prompt_may_start_over(scores: list[Scores], data: st.DataObject) -> None:
    columns = PromptLogprobs()
    columns.extend(scores)
    assert list(columns) == scores
    assert (len(columns), columns.width) == (len(scores), len(scores[0][1]) if scores else 0)
    kept = data.draw(st.integers(0, len(scores) + 1))
    columns.cut(kept)
    assert list(columns) == scores[:kept]
    columns.extend(scores[kept:])
    assert list(columns) == scores
