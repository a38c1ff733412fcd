"""Memory that was freed, and that the C library keeps because it lies between pieces in use."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from time import process_time
from typing import Final

LOOK_S: Final = 1.0
"""Seconds between two looks at what this process does."""
IDLE_S: Final = 0.05
"""A process that took less processor time than that from look to look is idle."""


def trim() -> None:
    """Give it back to the system. Only glibc keeps it that way; elsewhere nothing happens.

    Reading a tokenizer or a checkpoint frees many small pieces at once. A process that goes on for days asks for this
    when it has loaded what it needs.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class IdleTrim:
    """Trims once when a process has become idle, so that the next request pays for it only after a pause."""

    def __init__(self, trim: Callable[[], None] = trim, used_s: Callable[[], float] = process_time) -> None:
        """`used_s` tells the processor time of this process, in seconds."""
        self._trim, self._used_s = trim, used_s
        self._seen, self._worked = used_s(), True

    async def run(self) -> None:
        """Look now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Trim, in a thread, if nothing was done since the last look but something before it."""
        used = self._used_s()
        idle, self._seen = used - self._seen < IDLE_S, used
        if idle and self._worked:
            await asyncio.to_thread(self._trim)
            self._seen = self._used_s()
        self._worked = not idle
