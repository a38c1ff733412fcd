"""Copies a sequence's KV to host memory and back, on a thread of its own beside the engine's steps.

A copy touches only pages that no step uses. The rest of a sequence (its sampler, the tokens it has to run) is always in
host memory.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from decode_node.pages import Grant
from hackkv.kv_memory import HostKv, KvMemory


class Swapper:
    """Runs copies one after another beside the engine. `close` waits for the last."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")

    async def out(self, grant: Grant, pages: int, rows: int) -> HostKv:
        """Copy the first `pages` pages of a grant, and the exact ones of its `rows` rows."""
        loop, copy_out = asyncio.get_running_loop(), self._memory.copy_out
        return await loop.run_in_executor(self._thread, copy_out, grant.pages[:pages], grant.slot, rows)

    async def back(self, grant: Grant, kv: HostKv) -> None:
        """Write `kv` to the first pages and the slot of a grant."""
        loop, copy_back = asyncio.get_running_loop(), self._memory.copy_back
        await loop.run_in_executor(self._thread, copy_back, kv, grant.pages, grant.slot)

    def close(self) -> None:
        """Wait for the copies under way."""
        self._thread.shutdown(wait=True)
