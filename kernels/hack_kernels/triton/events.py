"""Time that a GPU spends, by events on its stream: the host's clock would measure how long it takes to enqueue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark on a stream, after the work that was enqueued before it."""

    def query(self) -> bool:
        """Whether the device has reached the mark."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to a later one of its kind. The device must have reached both."""
        ...


def mark(device: torch.device) -> Event | None:
    """A mark on the current stream of `device`, whatever the calling thread's current device is. None while a CUDA
    graph is captured there, because an event in a graph has no time."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class EventStopwatch:
    """Implements `Stopwatch`. Work is missing from the sum until the device has finished it; no call waits for it. The
    work of a CUDA graph is not measured."""

    def __init__(self, new_mark: Callable[[], Event | None]) -> None:
        self._new_mark = new_mark
        self._seconds = 0.0
        self._running = deque[tuple[Event, Event]]()
        """Measurements that the device may not have finished, in their order."""

    def __enter__(self) -> None:
        self._began = self._new_mark()

    def __exit__(self, *exc: object) -> None:
        ended = self._new_mark()
        if self._began is not None and ended is not None:  # while a graph is captured, no event may be queried either
            self._running.append((self._began, ended))
            self._collect()

    @property
    def seconds(self) -> float:
        """Seconds of the measurements that are finished."""
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            began, ended = self._running.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
