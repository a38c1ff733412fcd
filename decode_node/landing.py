"""Writes the frames of handoffs to pages. Large frames take a thread of their own, so the event loop stays free.

A frame is verified and decoded into memory of its own. Only then is it written to the pages that its reservation holds,
under a lock that `LandingGrant.close` takes as well. So pages that are given back after `close` have no writer any
more. `close` waits for the write of one frame at most, never for a decoder.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from typing import Final

from torch import Tensor

from decode_node.pages import Grant
from hackkv.errors import TransferError
from hackkv.framing import CheckedFrame
from hackkv.kv_memory import KvMemory
from hackkv.types import KvFrame

AT_ONCE_BYTES: Final = 64 << 10
"""A smaller frame lands in less time than it takes to go to another thread and back."""


class LandingGrant:
    """A grant whose pages and slot a handoff may write to until `close`."""

    def __init__(self, grant: Grant, rows: int) -> None:
        """`rows` are those that the handoff brings."""
        self.held, self.rows = grant, rows
        self.lock = Lock()
        self.closed = False
        """Changes under the lock."""

    def close(self) -> None:
        """Forbid all further writes. Waits for the write that is under way."""
        with self.lock:
            self.closed = True


class LandingStrip:
    """Lands the frames of a node's handoffs, one at a time. `close` waits for the one that is landing."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="landing")

    async def land(self, grant: LandingGrant, frame: CheckedFrame) -> float:
        """Verify, decode and write a frame. Returns the seconds that it took.

        A task that is cancelled here leaves the frame landed or not landed; which of the two is settled when
        `grant.close` returns. Raises `FrameRefused`, or `TransferError` when the grant is closed.
        """
        if frame.raw_bytes <= AT_ONCE_BYTES:
            return self._land(grant, frame)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._land, grant, frame)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=True)

    def _land(self, grant: LandingGrant, checked: CheckedFrame) -> float:
        began = perf_counter()
        planes = checked.open()
        with grant.lock:
            if grant.closed:
                raise TransferError(f"transfer {checked.frame.transfer_id} was cancelled at the decode node")
            self._write(grant.held, grant.rows, checked.frame, planes)
        return perf_counter() - began

    def _write(self, grant: Grant, rows: int, frame: KvFrame, planes: dict[str, Tensor]) -> None:
        heads = range(frame.head_start, frame.head_start + frame.head_count)
        if frame.rows:
            self._memory.install_rows(frame.layer, heads, grant.slot, rows, planes)
        else:
            pages = grant.pages[frame.page_start : frame.page_start + frame.page_count]
            self._memory.install(frame.layer, heads, pages, planes)
