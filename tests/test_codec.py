"""A batch as kernels read it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hackkv.batch import Batch, Span

PI = 32


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], list[Span]]:
    """The last and the next step of some sequences. Most run one token more, some of them with another page."""
    last = [
        Span(
            slot,
            draw(st.integers(0, 3 * PI)),
            draw(st.sampled_from([1, 1, 1, PI])),
            tuple(range(8 * slot, 8 * slot + 5)),
        )
        for slot in range(draw(st.integers(1, 4)))
    ]
    after = [Span(span.slot, span.held + span.count, span.count, span.pages) for span in last]
    change = draw(st.sampled_from(["nothing", "page", "slot", "count", "order", "one leaves"]))
    first = after[0]
    if change == "page":
        after[0] = Span(first.slot, first.held, first.count, (*first.pages, 99))
    elif change == "slot":
        after[0] = Span(9, first.held, first.count, first.pages)
    elif change == "count":
        after[0] = Span(first.slot, first.held, first.count + 1, first.pages)
    elif change == "order":
        after.reverse()
    elif change == "one leaves" and len(after) > 1:
        del after[0]
    return last, after


@given(steps())
def test_what_is_shared_with_the_last_batch_is_what_it_would_be_anew(run: tuple[list[Span], list[Span]]) -> None:
    last, after = run
    found, anew = Batch.of(after, PI, last=Batch.of(last, PI)), Batch.of(after, PI)
    assert (found.spans, found.page_tokens, found.is_decode, found.filled) == (
        anew.spans,
        anew.page_tokens,
        anew.is_decode,
        anew.filled,
    )
    for name in ("starts", "counts", "offsets", "table", "slots"):
        assert torch.equal(getattr(found.where, name), getattr(anew.where, name)), name
