"""Recorders: a device records work once, and repeats it at a fraction of the host's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Recorder(Protocol):
    """Records work. All recordings of one recorder share scratch memory."""

    queues: bool
    """Whether the device works behind the host. Recording waits for such a device, so everything is recorded before the
    node serves."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns a callable that repeats `work` on the same memory. Its scratch memory stays valid until the next
        recording runs. Runs `work` once or twice. Raises `RuntimeError` if the device cannot record."""
        ...
