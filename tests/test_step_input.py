"""The input of recorded steps: the device has the step that was put last, whatever was put before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hackkv.batch import Span
from hackkv.step_input import MIRRORS, Spare, StepInput
from hackkv.streams import InlineLane

MOST, PAGES, PI = 5, 40, 4
CPU = torch.device("cpu")
spans = st.lists(
    st.builds(
        lambda slot, held, first, evicted: Span(slot, held, 1, tuple(range(first, first + held // PI + 1)), evicted),
        st.integers(0, 9),
        st.integers(0, PAGES * PI - 1),
        st.integers(0, 1000),
        st.integers(0, 9),
    ),
    max_size=MOST,
)


@given(st.lists(spans, min_size=1, max_size=8), st.data())
def test_the_device_has_the_step_that_was_put_last(steps: list[list[Span]], data: st.DataObject) -> None:
    """Sequences keep their rows of the table, move up, grow and leave."""
    made, going = StepInput(MOST, PAGES, PI, Spare(7777, 99), CPU), list[Span]()
    for new in steps:
        kept = data.draw(st.lists(st.sampled_from(going), unique_by=id)) if going else []
        going = [*kept, *new][:MOST]
        filled, size = made.filled(going), data.draw(st.integers(len(going), MOST))
        fills = data.draw(st.integers(len(filled), MOST))
        made.put(going, [100 + row for row in range(len(going))], size, filled, fills, InlineLane())
        batch, pages, rest = made.batch(size, torch.zeros(size)), made.fills(fills), size - len(going)
        assert batch.where.starts.tolist() == [*(span.held for span in going), *[0] * rest]
        assert batch.where.slots.tolist() == [*(span.slot for span in going), *[99] * rest]
        assert batch.where.counts.tolist() == [1] * size
        assert made.ids[:size].tolist() == [*(100 + row for row in range(len(going))), *[0] * rest]
        assert made.positions[: len(going)].tolist() == [span.position for span in going]
        for row, span in zip(batch.where.table.tolist(), going, strict=False):
            assert tuple(row[: len(span.pages)]) == span.pages
        assert pages.page_ids.tolist() == [*(span.pages[-1] for span in filled), *[7777] * (fills - len(filled))]
        assert pages.slots.tolist() == [*(span.slot for span in filled), *[99] * (fills - len(filled))]
        assert pages.starts[: len(filled)].tolist() == [span.held + 1 - PI for span in filled]


def test_host_memory_is_written_again_when_its_copy_is_over() -> None:
    """The device lags by as many inputs as there are mirrors. The next input waits only for the oldest copy."""
    waited = list[int]()

    class Mark:
        done = False

        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    class Lagging(InlineLane):
        marks = 0

        def mark(self) -> Mark:
            self.marks += 1
            return Mark(self.marks)

    made, lane = StepInput(MOST, PAGES, PI, Spare(1, 1), CPU), Lagging()
    for _ in range(MIRRORS + 2):
        made.put([], [], 1, [], 0, lane)
    assert waited == [1, 2]


def test_a_sequence_of_more_pages_than_there_is_room_for_is_refused() -> None:
    made = StepInput(MOST, PAGES, PI, Spare(1, 1), CPU)
    with pytest.raises(ValueError, match="could not broadcast"):
        made.put([Span(0, 0, 1, tuple(range(100)))], [1], 1, [], 0, InlineLane())
