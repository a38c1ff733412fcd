"""Lanes of a device, each of which does its work in order, and marks in them: on the processor and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch


class Mark(Protocol):
    """A place in a lane, behind what the lane was given before."""

    @property
    def done(self) -> bool:
        """Whether the lane has reached the mark."""
        ...

    def wait(self) -> None:
        """Hold the calling thread until it is done."""
        ...


class Lane(Protocol):
    """Work of a device in the order in which it was given. Any thread may give some."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches; `work` is called once, now or later."""
        ...

    def mark(self) -> Mark:
        """A mark behind everything so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Work that the lane is given from now on begins when `mark` is done. The host does not wait."""
        ...


class Done:
    """Implements `Mark` for work that is done."""

    done = True

    def wait(self) -> None:
        """Nothing is left to wait for."""


DONE: Final = Done()


class InlineLane:
    """Implements `Lane` on the processor: work is done when `run` returns."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` now."""
        work()

    def mark(self) -> Mark:
        """`DONE`: nothing is left to do."""
        return DONE

    def wait(self, mark: Mark) -> None:
        """Nothing to do: every mark of this lane is done."""


class EventMark:
    """Implements `Mark` by an event of torch."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Asks the device."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Hold the calling thread; other threads go on."""
        self._event.synchronize()


class StreamLane:
    """Implements `Lane` by a stream of torch."""

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        """`beside` makes a stream of its own; else it is the one on which `device` computes."""
        self._torch = torch.get_device_module(device)
        self._stream = self._torch.Stream(device) if beside else self._torch.current_stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue on the stream, whichever device and stream the calling thread has."""
        with self._torch.stream(self._stream):
            work()

    def mark(self) -> EventMark:
        """An event on the stream."""
        event = self._torch.Event()
        event.record(self._stream)
        return EventMark(event)

    def wait(self, mark: Mark) -> None:
        """Wait for the event of a mark that a `StreamLane` has made; any other mark is done."""
        if isinstance(mark, EventMark):
            self._stream.wait_event(mark._event)
