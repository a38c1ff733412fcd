"""Continuous batching: sequences join and leave between any two steps. Numbers only, no tensors.

A sequence holds pages for its whole length from the moment its room was reserved, so a step never lacks memory; what is
limited here is how many run in one step.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class DecodeScheduler(Generic[Owner]):
    """First come, first served up to `max_batch` sequences a step."""

    def __init__(self, max_batch: int) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}")
        self._max_batch = max_batch
        self._waiting: deque[Owner] = deque()
        self._running: list[Owner] = []

    @property
    def waiting(self) -> int:
        """Sequences that have landed and wait for a place in the batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def join(self, sequence: Owner) -> None:
        """Queue a sequence; it is in the next step that has a place."""
        self._waiting.append(sequence)

    def leave(self, sequence: Owner) -> None:
        """Take a sequence out, finished or not; one that is not here is ignored."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> list[Owner]:
        """The sequences of the next step; empty when there is nothing to do."""
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        return list(self._running)
