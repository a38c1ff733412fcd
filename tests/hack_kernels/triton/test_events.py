"""A GPU's time is summed when the GPU has spent it, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hack_kernels.triton.events import Event, EventStopwatch
from hypothesis import given
from hypothesis import strategies as st


class Stream:
    """A device that reaches one mark after another when a test says so. Each takes a millisecond."""

    def __init__(self) -> None:
        self.marks = self.reached = self.asked = 0

    def mark(self) -> Event:
        self.marks += 1
        return Mark(self, self.marks)

    def no_mark(self) -> None:
        """Give no mark, as while a graph is captured."""


@dataclass(frozen=True)
class Mark:
    stream: Stream
    at: int

    def query(self) -> bool:
        self.stream.asked += 1
        return self.at <= self.stream.reached

    def elapsed_time(self, end_event: Mark, /) -> float:
        assert self.query()
        assert end_event.query()
        return end_event.at - self.at


@given(st.lists(st.sampled_from(["measure", "work", "reach"]), max_size=40))
def test_what_is_measured_is_what_the_device_has_finished(acts: list[str]) -> None:
    stream = Stream()
    watch, measured = EventStopwatch(stream.mark), list[tuple[int, int]]()
    for act in acts:
        if act == "measure":
            with watch:
                begin = stream.marks
                stream.mark()
            measured.append((begin, stream.marks))
        elif act == "work":
            stream.mark()
        else:
            stream.reached += 1
        due = sum(end - begin for begin, end in measured if end <= stream.reached)
        assert abs(watch.seconds * 1000 - due) < 1e-9


def test_nothing_is_measured_and_no_mark_is_asked_while_a_graph_is_captured() -> None:
    """CUDA refuses both during a capture."""
    stream = Stream()
    marks: list[Callable[[], Event | None]] = [stream.mark, stream.mark, stream.no_mark, stream.no_mark]
    watch = EventStopwatch(lambda: marks.pop(0)())
    with watch:
        pass
    asked = stream.asked
    with watch:
        pass
    assert stream.asked == asked
    stream.reached = 2
    assert watch.seconds * 1000 == 1
