"""A GPU's time is summed when the GPU has spent it, and nobody waits for that."""

from __future__ import annotations

from dataclasses import dataclass

from hack_kernels.triton.events import Event, EventStopwatch
from hypothesis import given
from hypothesis import strategies as st


class Stream:
    """A device that comes to one mark after another, when a test says so. Each takes a millisecond."""

    def __init__(self) -> None:
        self.marks = self.reached = 0

    def mark(self) -> Event:
        self.marks += 1
        return Mark(self, self.marks)


@dataclass(frozen=True)
class Mark:
    stream: Stream
    at: int

    def query(self) -> bool:
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
