"""Writes the frames of handoffs to pages, and reads pages that are lent.

Large frames, and all frames on a GPU, land on a thread beside the event loop, which stays free.

A frame is verified and decoded into memory of its own. Only then is it written to the pages that its reservation holds,
under a lock that `LandingGrant.close` takes as well. So pages that are given back after `close` have neither writer nor
reader. `close` waits for the copy of one frame at most, never for a coder.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import perf_counter
from typing import Final

from decode_node.pages import Grant
from hackkv.errors import TransferError
from hackkv.framing import CheckedFrame, FrameWriter
from hackkv.kv_memory import KvMemory
from hackkv.types import KvFrame

AT_ONCE_BYTES: Final = 64 << 10
"""The largest frame that lands on the event loop, unless it needs a device: a switch of threads would take longer."""


class LandingGrant:
    """A grant whose pages and slot a handoff may write to, and whose held pages may be lent, until `close`."""

    def __init__(self, grant: Grant, rows: int, exact: int = 0) -> None:
        """`rows` is the number of the prompt's rows. The handoff lacks the exact rows of the first `exact` pages."""
        self.held, self.rows, self.exact = grant, rows, exact
        self.lock = Lock()
        self.closed = False
        """Whether copies are forbidden. Changes under the lock."""

    def close(self) -> None:
        """Forbid all further copies. Waits for the copy that is under way."""
        with self.lock:
            self.closed = True

    def check(self, transfer_id: str) -> None:
        """Raise `TransferError` if copies are forbidden. The caller must hold the lock."""
        if self.closed:
            raise TransferError(f"transfer {transfer_id} was cancelled at the decode node")


class LandingStrip:
    """Lands the frames of a node's handoffs, one at a time. `close` waits for the frame that is landing."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="landing")

    async def land(self, grant: LandingGrant, frame: CheckedFrame) -> float:
        """Verify, decode and write a frame. Returns the seconds that this took.

        If the task is cancelled here, the frame may still land, but not after `grant.close` has returned. Raises
        `FrameRefused`, or `TransferError` when the grant is closed.
        """
        if frame.raw_bytes <= AT_ONCE_BYTES and self._memory.lanes.inline:
            return self._land(grant, frame)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._land, grant, frame)

    async def seal(self, grant: LandingGrant, transfer_id: str) -> None:
        """Seal the pages that came as exact rows, when all frames have landed. Raises `TransferError` when the grant is
        closed."""
        if self._memory.footprint.exact_pages(grant.rows, grant.held.held):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._seal, grant, transfer_id)

    async def lift(self, grant: LandingGrant, layer: int, pages: range, writer: FrameWriter) -> list[KvFrame]:
        """The frames of a layer's pages `pages`, which the grant holds. Raises `TransferError` when it is closed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._lift, grant, layer, pages, writer)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=True)

    def _land(self, grant: LandingGrant, checked: CheckedFrame) -> float:
        began = perf_counter()
        layers, runs = checked.open(), self._memory.footprint.runs(grant.rows, grant.exact)
        with grant.lock, self._memory.lanes.arriving():
            grant.check(checked.frame.transfer_id)
            self._memory.install_frame(checked.frame, layers, grant.held.pages, grant.held.slot, runs)
        return perf_counter() - began

    def _seal(self, grant: LandingGrant, transfer_id: str) -> None:
        for layer in range(len(self._memory.pools)):
            with grant.lock, self._memory.lanes.arriving():
                grant.check(transfer_id)
                self._memory.seal_rows(layer, grant.held.pages, grant.held.slot, grant.rows, grant.held.held)

    def _lift(self, grant: LandingGrant, layer: int, pages: range, writer: FrameWriter) -> list[KvFrame]:
        with grant.lock:
            grant.check(writer.transfer_id)
            leaving = self._memory.export(layer, grant.held.pages[pages.start : pages.stop])
            parts = [(pages.start + part.first, part.own()) for part in leaving]
        return [frame for first, planes in parts for frame in writer.frames(layer, first, [planes])]
