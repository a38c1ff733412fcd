"""Copies KV of swapped sequences and of idle pages to host memory and back, on a thread beside the engine's steps.

A copy touches only pages that no step uses, with one exception: an idle page may be taken while it is copied. That copy
is thrown away (`kept_pages.py`). The rest of a sequence (its sampler, the tokens to run) is always in host memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from decode_node.kept_pages import Copy
from decode_node.pages import Grant
from hackkv.kv_memory import HostKv, HostPages, KvMemory


class Swapper:
    """Runs copies one after another beside the engine. `close` waits for the last one."""

    def __init__(self, memory: KvMemory, host_places: int) -> None:
        """Host memory has room for copies of `host_places` pages."""
        self._memory = memory
        self._host_pages = HostPages(memory, host_places)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")

    async def out(self, grant: Grant, pages: int, rows: int) -> HostKv:
        """Copy the first `pages` pages of a grant, and the exact rows of a sequence of `rows` rows."""
        loop, copy_out = asyncio.get_running_loop(), self._memory.copy_out
        return await loop.run_in_executor(self._thread, copy_out, grant.pages[:pages], grant.slot, rows)

    async def back(self, grant: Grant, kv: HostKv) -> None:
        """Write `kv` to the first pages and the slot of a grant."""
        loop, copy_back = asyncio.get_running_loop(), self._memory.copy_back
        await loop.run_in_executor(self._thread, copy_back, kv, grant.pages, grant.slot)

    async def resume(self, grant: Grant, kv: HostKv, rows: int) -> None:
        """Write the exact rows of `kv` that a sequence of `rows` rows sees to a grant's slot."""
        loop, resume = asyncio.get_running_loop(), self._memory.resume
        await loop.run_in_executor(self._thread, resume, kv, grant.slot, rows)

    async def save(self, copies: Sequence[Copy]) -> None:
        """Copy pages to their places in host memory."""
        loop, save = asyncio.get_running_loop(), self._host_pages.save
        await loop.run_in_executor(self._thread, save, [copy.page for copy in copies], [copy.place for copy in copies])

    async def load(self, copies: Sequence[Copy]) -> None:
        """Copy places in host memory to pages."""
        loop, load = asyncio.get_running_loop(), self._host_pages.load
        await loop.run_in_executor(self._thread, load, [copy.place for copy in copies], [copy.page for copy in copies])

    def close(self) -> None:
        """Wait for the copies under way."""
        self._thread.shutdown(wait=True)
