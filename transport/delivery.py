"""The receiving half that all wires share: it runs `deliver` in a task and feeds it frame by frame.

`deliver` holds pages, so it needs time to clean up when the sender is lost. Its frame iterator raises the loss at the
next frame at the latest. `deliver` is cancelled only if it does not return in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, NodeLost
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from transport.base import Deliver
from transport.closing import reap
from transport.coder import MAX_PAYLOAD_BYTES
from transport.status import internal

log = logging.getLogger(__name__)

FRAME_TIMEOUT_S = 300.0
"""Seconds that a receiver waits for the next frame, including the time until prefill seals a page."""

Pull = Callable[[], Coroutine[Any, Any, KvFrame | HandoffEnd]]
Accept = Callable[[], Awaitable[None]]


def check_size(item: KvFrame | HandoffEnd) -> None:
    """Refuse a frame with a payload larger than any receiver accepts."""
    if isinstance(item, KvFrame) and len(item.payload) > MAX_PAYLOAD_BYTES:
        message = f"frame {item.seq} holds {len(item.payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted"
        raise FrameRefused(message, reason="oversized")


class Delivery(AsyncIterator[KvFrame | HandoffEnd]):
    """One handoff at the receiver. `deliver` reads frames by iterating it.

    `accept` runs when the first frame is asked for. `pull` fetches one frame, in a task that is cancelled when the wait
    for it ends. `frame_timeout_s` bounds each wait, and the time that `deliver` has to return once the sender is lost.
    """

    def __init__(self, deliver: Deliver, handoff: Handoff, accept: Accept, pull: Pull, frame_timeout_s: float) -> None:
        self._deliver = deliver
        self._handoff = handoff
        self._accept = accept
        self._pull = pull
        self._frame_timeout_s = frame_timeout_s
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loss: HackkvError | None = None
        self._accepted = False
        self._ended = False

    def lose(self, error: HackkvError) -> None:
        """Report that the sender is gone. The iterator raises `error`, and so does `run` unless `deliver` succeeds."""
        if self._loss is None:
            self._loss = error
            self._lost.set_result(None)

    async def run(self) -> Receipt:
        """Run `deliver` to its end. Raises its error; an unexpected exception is logged and becomes `internal`."""
        task = asyncio.create_task(self._receive(), name=f"deliver {self._handoff.transfer_id}")
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.lose(NodeLost(f"the sender of {self._handoff.transfer_id} went away"))
            raise
        finally:
            await self._settle(task)
        return self._verdict(task)

    async def __anext__(self) -> KvFrame | HandoffEnd:
        """Return the next frame. Raises the loss, the error of a malformed frame, or `DeadlineExceeded`."""
        if self._ended:
            raise StopAsyncIteration
        if self._loss is not None:
            raise self._loss
        if not self._accepted:
            self._accepted = True
            await self._accept()
        pull = asyncio.create_task(self._pull())
        try:
            waiting: set[asyncio.Future[Any]] = {pull, self._lost}
            await asyncio.wait(waiting, timeout=self._frame_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._loss is not None:
                raise self._loss
            if not pull.done():
                raise DeadlineExceeded(
                    f"no frame of {self._handoff.transfer_id} came within {self._frame_timeout_s:g} s"
                )
            item = pull.result()
        finally:
            await reap(pull)
        self._ended = isinstance(item, HandoffEnd)
        return item

    async def _receive(self) -> Receipt:
        try:
            return await self._deliver(self._handoff, self)
        except HackkvError:
            raise
        except Exception as error:
            raise internal(error, f"deliver {self._handoff.transfer_id}") from error

    async def _settle(self, task: asyncio.Task[Receipt]) -> None:
        try:
            await asyncio.wait({task}, timeout=self._frame_timeout_s)
        finally:
            if not task.done():
                log.error("deliver %s outlived its sender and is cancelled", self._handoff.transfer_id)
                await reap(task)
            elif not task.cancelled():
                task.exception()  # marked as retrieved: `_verdict` may not be reached

    def _verdict(self, task: asyncio.Task[Receipt]) -> Receipt:
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return task.result()
        if self._loss is not None:
            raise self._loss from error
        if error is not None:
            raise error
        raise NodeLost(f"the receiver of {self._handoff.transfer_id} was cancelled")
