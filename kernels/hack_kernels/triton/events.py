"""Time that a GPU spends, by events on its stream: the host's clock would measure how long it takes to enqueue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark that stands on a stream behind the work before it."""

    def query(self) -> bool:
        """Whether the device has come to the mark."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to a later mark of its kind; the device has come to both."""
        ...


def mark(device: torch.device) -> Event | None:
    """A mark on the current stream of `device`, whichever device the calling thread has. None while a CUDA graph is
    captured there: an event in a graph is no mark of a time."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class EventStopwatch:
    """Implements `Stopwatch`. Work that the device has not finished is missing until it has; nothing waits for it.
    What a CUDA graph does is not measured."""

    def __init__(self, new_mark: Callable[[], Event | None]) -> None:
        self._new_mark = new_mark
        self._seconds = 0.0
        self._running = deque[tuple[Event, Event]]()
        """Measurements that the device may not have finished, in their order."""

    def __enter__(self) -> None:
        self._began = self._new_mark()

    def __exit__(self, *exc: object) -> None:
        ended = self._new_mark()
        if self._began is not None and ended is not None:  # while a graph is captured no event may be asked either
            self._running.append((self._began, ended))
            self._collect()

    @property
    def seconds(self) -> float:
        """Of the measurements that are finished."""
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            began, ended = self._running.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
