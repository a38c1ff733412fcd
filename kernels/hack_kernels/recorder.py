"""How a device records what it is told to do, to do it again at a fraction of the host's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Recorder(Protocol):
    """What is recorded here shares one memory."""

    queues: bool
    """Whether the device works behind the host. Then recording waits for it, and what is needed is recorded before."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does again what `work` does, on the same memory. Runs `work`, maybe twice. What it takes for itself
        stays its own until something else that was recorded here runs. Raises `RuntimeError` if the device cannot."""
        ...
