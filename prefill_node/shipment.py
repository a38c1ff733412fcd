"""One request's compressed KV, from its first frame until the router closes the stream or the KV is given up.

    waiting ──assign──▶ pushed ──committed──▶ kept ──too long, or no room──▶ gone
       ▲                │    ▲                  │
       └────failed──────┘    └──────assign──────┘

The frames stay until the KV is gone (`kept_kv.py`), so all of them can be sent again. `assign` may come at any moment,
even while the prompt still runs. An assignment of a later epoch cancels a push that is under way. A timer bounds how
long the KV waits and how long it is kept, whatever the reader of `fates` does. All methods belong to the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from time import perf_counter

from hackkv.errors import DeadlineExceeded, HackkvError, HandshakeRefused
from hackkv.expected import Expected
from hackkv.framing import handoff_end, lacked_part, reissued
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.types import (
    Fingerprint,
    HandedOff,
    Handoff,
    HandoffEnd,
    HandoffFailed,
    KvFrame,
    PrefillJob,
    Receipt,
)
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.kept_kv import KeptKv
from transport.base import KvPusher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that KV stays in host memory while no push needs it."""

    unassigned_s: float
    """From token 0, or from a failed push, until a decode node is named."""
    kept_s: float
    """From the commit of a handoff."""


@dataclass(eq=False, slots=True)
class _Push:
    """One attempt to send the frames to one decode node."""

    epoch: int
    address: str
    held: HeldKv
    assigned_at: float = field(default_factory=perf_counter)
    sent_bytes: int = 0
    overlapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FrameKind:
    """The facts that all frames of a node share."""

    fingerprint: Fingerprint
    expected: Expected
    """The KV that a receiver expects, apart from the numbers of rows and held pages."""

    def lacked_part(self, frame: KvFrame, rows: int, held: HeldKv) -> KvFrame | None:
        """The part of `frame` that a receiver of `rows` rows lacks; see `hackkv.framing.lacked_part`."""
        return lacked_part(frame, replace(self.expected, num_rows=rows, held=held))


class Shipment:
    """The KV of one job, without the pages that its first decode node held. `ShipmentOutbox.open` makes it."""

    def __init__(
        self,
        job: PrefillJob,
        num_bytes: int,
        kind: FrameKind,
        pool: HostPool,
        sender: KvPusher,
        patience: Patience,
        on_pushed_out: Callable[[], None],
    ) -> None:
        """`num_bytes` is the most that the KV can take. `on_pushed_out` is called when other KV has pushed it out."""
        self._job, self._kind = job, kind
        self._sender, self._patience = sender, patience
        self._on_pushed_out = on_pushed_out
        self.kv = KeptKv(pool, num_bytes, self._pushed_out)
        self._push: _Push | None = None
        self._tasks: dict[_Push, asyncio.Task[None]] = {}
        self._epoch = job.epoch - 1
        self._fates: asyncio.Queue[HandedOff | HandoffFailed | HackkvError | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._keeps = True
        if job.decode_address:
            self.assign(job.epoch, job.decode_address, job.held)

    def finish(self, end: HandoffEnd, finished_at: float) -> None:
        """Append the end: the prompt is complete, and token 0 was chosen at `finished_at` (perf_counter)."""
        if self.kv.gone:
            return
        self.kv.finish(end, finished_at)
        if self._push is None:
            self._expect_assignment()
        else:
            self._push.overlapped_bytes = self._push.sent_bytes

    def assign(self, epoch: int, address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Send the KV without `held` to `address`, and cancel a push of an earlier epoch.

        Raises `HandshakeRefused` when the KV is gone, the frames lack pages that are not in `held`, or the epoch is not
        newer than the last one.
        """
        if self.kv.gone or not self.reaches(held):
            raise HandshakeRefused(f"the KV of transfer {self._job.transfer_id} is gone")
        if epoch <= self._epoch:
            raise HandshakeRefused(f"transfer {self._job.transfer_id} is in epoch {self._epoch} already, not {epoch}")
        self._give_up_push()
        self._disarm()
        self._epoch = epoch
        self.kv.hold_as(Tenant.WAITING)
        push = self._push = _Push(epoch, address, held)
        task = self._tasks[push] = asyncio.create_task(self._run(push), name=f"push {self._job.transfer_id}")
        task.add_done_callback(lambda _: self._tasks.pop(push))

    async def fates(self) -> AsyncIterator[HandedOff | HandoffFailed]:
        """The outcome of each push that was not cancelled; ends when the KV is gone.

        Raises `DeadlineExceeded` when no decode node was named in time, or the error given to `let_go`.
        """
        while (fate := await self._fates.get()) is not None:
            if isinstance(fate, HackkvError):
                raise fate
            yield fate

    def let_go(self, error: HackkvError | None = None) -> None:
        """Give up the KV: the stream ends, with `error` if there is one, and `assign` is refused."""
        self._drop(error)

    def stop_keeping(self) -> None:
        """Give up the KV as soon as a decode node has it."""
        self._keeps = False
        if self.kv.is_kept:
            self._drop(None)

    async def close(self) -> None:
        """Give up the KV and return its memory. Waits until no push is under way."""
        self.let_go()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def reaches(self, held: HeldKv) -> bool:
        """Whether the frames contain all KV that a receiver with `held` lacks."""
        return held.pages >= self._job.held.pages and held.exact >= self._job.held.exact

    @property
    def transfer_id(self) -> str:
        """The name that the router gave the job."""
        return self._job.transfer_id

    @property
    def was_assigned(self) -> bool:
        """Whether a decode node was ever named."""
        return self._epoch >= self._job.epoch

    async def _run(self, push: _Push) -> None:
        num_tokens = len(self._job.request.prompt_ids)
        handoff = Handoff(self._job.transfer_id, push.epoch, self._kind.fingerprint, num_tokens, push.held)
        # A decode node limits the wait for each frame of a handoff that it has accepted. The push starts when the first
        # frame is ready, so the time in this node's queue does not count.
        await self.kv.item(0)
        try:
            receipt = await self._sender.push(push.address, handoff, self._leaving(push))
        except HackkvError as error:
            self._failed(push, error)
        except Exception as error:  # a wire's bug must not lose the KV, which is still here
            log.exception("push of %s to %s", self._job.transfer_id, push.address)
            self._failed(push, HackkvError(f"push failed: {type(error).__name__}: {error}"))
        else:
            self._committed(push, receipt)

    async def _leaving(self, push: _Push) -> AsyncIterator[KvFrame | HandoffEnd]:
        index = sent = 0
        while isinstance(item := await self.kv.item(index), KvFrame):
            index += 1
            part: KvFrame | None = item
            if push.held != self._job.held:  # beside the loop: a plane may have to be decoded and coded again
                num_tokens = len(self._job.request.prompt_ids)
                part = await asyncio.to_thread(self._kind.lacked_part, item, num_tokens, push.held)
            if part is not None:
                push.sent_bytes += len(part.payload)
                yield reissued(part, push.epoch, sent)
                sent += 1
        yield handoff_end(item.transfer_id, push.epoch, sent, item.first_token)

    def _committed(self, push: _Push, receipt: Receipt) -> None:
        if push is not self._push:
            return
        self._push = None
        now = perf_counter()
        exposed_from = max(self.kv.finished_at, push.assigned_at)
        swap_wait_s = exposed_from - self.kv.finished_at if push.epoch == self._job.epoch else 0.0
        self._fates.put_nowait(
            HandedOff(receipt, swap_wait_s, now - exposed_from, push.overlapped_bytes, epoch=push.epoch)
        )
        if not self._keeps:
            self._drop(None)
            return
        self.kv.hold_as(Tenant.KEPT)
        self._arm(self._patience.kept_s, None)

    def _failed(self, push: _Push, error: HackkvError) -> None:
        if push is not self._push:
            return
        self._push = None
        self._fates.put_nowait(HandoffFailed(push.epoch, error.code, str(error)))
        if self.kv.end is not None:
            self._expect_assignment()

    def _expect_assignment(self) -> None:
        limit = self._patience.unassigned_s
        words = f"no decode node was named for transfer {self._job.transfer_id} within {limit:g} s"
        self._arm(limit, DeadlineExceeded(words))

    def _arm(self, seconds: float, error: HackkvError | None) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._drop, error)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pushed_out(self) -> None:
        self._drop(None)
        self._on_pushed_out()

    def _give_up_push(self) -> None:
        push, self._push = self._push, None
        if push is not None and push in self._tasks:
            self._tasks[push].cancel()

    def _drop(self, error: HackkvError | None) -> None:
        if self.kv.gone:
            return
        self._disarm()
        self._give_up_push()
        self.kv.drop()
        self._fates.put_nowait(error)
