"""Cuts long work of an event loop into slices of time, between which other tasks run."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

IDLE_S: Final = 0.0002
"""A round of the event loop that is shorter, in seconds, had nothing to do for other tasks."""


async def give_way(others_s: float) -> None:
    """Let other tasks run until they have nothing to do, or for `others_s` seconds."""
    until = perf_counter() + others_s
    while True:
        began = perf_counter()
        await asyncio.sleep(0)
        now = perf_counter()
        if now - began < IDLE_S or now >= until:
            return
