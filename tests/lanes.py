"""Lanes that lag: an imitation of a GPU on which a missing wait makes bytes wrong.

Work on a lane does not run before a caller waits for it. Its order is drawn from all orders that lanes and marks allow.
Slots of the ring contain rubbish while nothing may read them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

import pytest
import torch

from hackkv import kv_memory
from hackkv.lanes import HostRing, Lanes, Slot
from hackkv.streams import DONE, InlineLane, Lane, Mark, StreamLane

CPU: Final = torch.device("cpu")
SLOTS: Final = 3


class LaggingMark:
    """Implements `Mark`."""

    def __init__(self, device: Lagging, lane: LaggingLane, place: int) -> None:
        self._device, self._lane, self._place = device, lane, place

    @property
    def done(self) -> bool:
        return self._lane.over >= self._place

    def wait(self) -> None:
        self._device.run_until(self)


class LaggingLane:
    """Implements `Lane`."""

    def __init__(self, device: Lagging) -> None:
        self._device = device
        self.over = 0
        self._due = deque[Callable[[], None] | Mark]()

    def run(self, work: Callable[[], None]) -> None:
        with self._device.lock:
            self._due.append(work)

    def mark(self) -> Mark:
        with self._device.lock:
            return LaggingMark(self._device, self, self.over + len(self._due))

    def wait(self, mark: Mark) -> None:
        with self._device.lock:
            self._due.append(mark)

    @property
    def can_go_on(self) -> bool:
        return bool(self._due) and (callable(self._due[0]) or self._due[0].done)

    def go_on(self) -> None:
        work = self._due.popleft()
        if callable(work):
            work()
        self.over += 1


class Lagging:
    """Three lanes. With `computes` the first one lags too, for tests that give it work. Models compute at once."""

    def __init__(self, seed: int, *, computes: bool) -> None:
        self.lock = threading.RLock()
        self._lags = [LaggingLane(self) for _ in range(3)]
        self._random = Random(seed)
        self.waits = 0
        """The number of waits for work that was not done."""
        compute: Lane = self._lags[0] if computes else InlineLane()
        self.lanes = compute, self._lags[1], self._lags[2]

    def run_until(self, mark: LaggingMark) -> None:
        """Run work of random lanes until the mark is done."""
        with self.lock:
            self.waits += not mark.done
            while not mark.done:
                ready = [lane for lane in self._lags if lane.can_go_on]
                assert ready, "lanes wait for each other"
                self._random.choice(ready).go_on()


class RubbishRing(HostRing):
    """A ring that overwrites a slot when it is taken, and when it is given back free."""

    def take(self) -> Slot:
        slot = super().take()
        slot.memory.fill_(0xA5)
        return slot

    def give_back(self, slot: Slot, mark: Mark = DONE) -> None:
        if mark.done:
            slot.memory.fill_(0x5A)
        super().give_back(slot, mark)


@contextmanager
def on_lanes(lanes: tuple[Lane, Lane, Lane]) -> Iterator[list[Lanes]]:
    """Give these lanes and a ring of a few small slots to every `KvMemory` that is made; collect its `Lanes`."""
    made = list[Lanes]()

    def lanes_on(device: torch.device, most_bytes: int) -> Lanes:
        made.append(Lanes(device, lanes, RubbishRing(SLOTS, most_bytes, pinned=False)))
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_memory, "lanes_on", lanes_on)
        yield made


def streams() -> tuple[Lane, Lane, Lane]:
    """The lanes of a GPU over torch's CPU streams, which do all work at once."""
    return StreamLane(CPU, beside=False), StreamLane(CPU, beside=True), StreamLane(CPU, beside=True)
