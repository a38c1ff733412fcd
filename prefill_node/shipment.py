"""One request's compressed KV, from its first frame until the router closes the stream or the KV has to go.

    waiting ──assign──▶ pushed ──committed──▶ kept ──too long, or no room──▶ gone
       ▲                │    ▲                  │
       └────failed──────┘    └──────assign──────┘

The frames stay all the time, so any of them can be sent once more: `assign` may come at any moment, also while the
prompt still runs, and a later epoch gives up a push that is under way. The shipment owns its bytes in the host pool; a
timer bounds how long it waits and how long it is kept, whatever its reader does. All methods belong to the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter

from hackkv.errors import DeadlineExceeded, HackkvError, HandshakeRefused
from hackkv.framing import handoff_end, reissued
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
from prefill_node.host_pool import Claim, HostPool, Tenant
from transport.base import KvSender

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long KV lies in host memory though nobody asks for it, in seconds."""

    unassigned_s: float = 300.0
    """From token 0, or from a failed push, until a decode node is named."""
    kept_s: float = 1800.0
    """From the commit of a handoff."""


DEFAULT_PATIENCE = Patience()


@dataclass(eq=False, slots=True)
class _Push:
    """One try to bring the frames to one decode node."""

    epoch: int
    address: str
    assigned_at: float = field(default_factory=perf_counter)
    sent_bytes: int = 0
    overlapped_bytes: int = 0


class Shipment:
    """The KV of one job; made by `Outbox.open`."""

    def __init__(
        self,
        job: PrefillJob,
        num_bytes: int,
        fingerprint: Fingerprint,
        pool: HostPool,
        sender: KvSender,
        patience: Patience,
        on_pushed_out: Callable[[], None],
    ) -> None:
        """`on_pushed_out` is called when the kept KV had to make room."""
        self._job, self._num_bytes, self._fingerprint = job, num_bytes, fingerprint
        self._pool, self._sender, self._patience = pool, sender, patience
        self._on_pushed_out = on_pushed_out
        self._claim: Claim | None = None
        self._frames: list[KvFrame] = []
        self._end: HandoffEnd | None = None
        self._finished_at = 0.0
        self._grew = asyncio.Event()
        self._push: _Push | None = None
        self._tasks: dict[_Push, asyncio.Task[None]] = {}
        self._epoch = job.epoch - 1
        self._fates: asyncio.Queue[HandedOff | HandoffFailed | HackkvError | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._keeps = True
        self._gone = False
        if job.decode_address:
            self.assign(job.epoch, job.decode_address)

    def claim_room(self) -> bool:
        """Take the host memory that the whole KV will need; False if there is none now."""
        if self._gone:
            return False
        if self._claim is None:
            self._claim = self._pool.claim(Tenant.WAITING, self._num_bytes, self._pushed_out)
        return self._claim is not None

    def put(self, frame: KvFrame) -> None:
        """Append a frame; without effect once the KV is gone."""
        if not self._gone:
            self._frames.append(frame)
            self._grew.set()

    def finish(self, end: HandoffEnd, finished_at: float) -> None:
        """The prompt is complete: token 0 was chosen at `finished_at` (perf_counter)."""
        if self._gone:
            return
        self._end, self._finished_at = end, finished_at
        self._grew.set()
        if self._push is None:
            self._expect_assignment()
        else:
            self._push.overlapped_bytes = self._push.sent_bytes

    def assign(self, epoch: int, address: str) -> None:
        """Send everything to `address`, giving up a push of an earlier epoch.

        Raises `HandshakeRefused` when the KV is gone or the epoch is not newer than the last one.
        """
        if self._gone:
            raise HandshakeRefused(f"the KV of transfer {self._job.transfer_id} is gone")
        if epoch <= self._epoch:
            raise HandshakeRefused(f"transfer {self._job.transfer_id} is in epoch {self._epoch} already, not {epoch}")
        self._give_up_push()
        self._disarm()
        self._epoch = epoch
        if self._claim is not None:
            self._pool.turn(self._claim, Tenant.WAITING)
        push = self._push = _Push(epoch, address)
        task = self._tasks[push] = asyncio.create_task(self._run(push), name=f"push {self._job.transfer_id}")
        task.add_done_callback(lambda _: self._tasks.pop(push))

    async def fates(self) -> AsyncIterator[HandedOff | HandoffFailed]:
        """What becomes of each push that was not given up; ends when the KV is gone.

        Raises `DeadlineExceeded` when no decode node was named in time, or what `let_go` was given.
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
        if self._claim is not None and self._claim.tenant is Tenant.KEPT:
            self._drop(None)

    async def close(self) -> None:
        """Give everything back; returns when no push is under way."""
        self.let_go()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def transfer_id(self) -> str:
        """The name that the router gave it."""
        return self._job.transfer_id

    @property
    def was_assigned(self) -> bool:
        """Whether a decode node was ever named."""
        return self._epoch >= self._job.epoch

    @property
    def is_gone(self) -> bool:
        """Whether the KV was given up."""
        return self._gone

    async def _run(self, push: _Push) -> None:
        handoff = Handoff(self._job.transfer_id, push.epoch, self._fingerprint, len(self._job.request.prompt_ids))
        # A decode node that has accepted a handoff counts the seconds to each frame; a queue is not its business.
        await self._item(0)
        try:
            receipt = await self._sender.push(push.address, handoff, self._leaving(push))
        except HackkvError as error:
            self._failed(push, error)
        except Exception as error:  # whatever a wire does, the KV is still here
            log.exception("push of %s to %s", self._job.transfer_id, push.address)
            self._failed(push, HackkvError(f"push failed: {type(error).__name__}: {error}"))
        else:
            self._committed(push, receipt)

    async def _leaving(self, push: _Push) -> AsyncIterator[KvFrame | HandoffEnd]:
        index = 0
        while isinstance(item := await self._item(index), KvFrame):
            index += 1
            push.sent_bytes += len(item.payload)
            yield item if item.epoch == push.epoch else reissued(item, push.epoch)
        yield handoff_end(item.transfer_id, push.epoch, item.num_frames, item.first_token)

    async def _item(self, index: int) -> KvFrame | HandoffEnd:
        """Frame number `index`, or the end after the last one, once it is there."""
        while index >= len(self._frames):
            if self._end is not None:
                return self._end
            self._grew.clear()
            await self._grew.wait()
        return self._frames[index]

    def _committed(self, push: _Push, receipt: Receipt) -> None:
        if push is not self._push:
            return
        self._push = None
        now = perf_counter()
        exposed_from = max(self._finished_at, push.assigned_at)
        swap_wait_s = exposed_from - self._finished_at if push.epoch == self._job.epoch else 0.0
        self._fates.put_nowait(
            HandedOff(receipt, swap_wait_s, now - exposed_from, push.overlapped_bytes, epoch=push.epoch)
        )
        if not self._keeps:
            self._drop(None)
            return
        if self._claim is not None:
            self._pool.turn(self._claim, Tenant.KEPT)
        self._arm(self._patience.kept_s, None)

    def _failed(self, push: _Push, error: HackkvError) -> None:
        if push is not self._push:
            return
        self._push = None
        self._fates.put_nowait(HandoffFailed(push.epoch, error.code, str(error)))
        if self._end is not None:
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
        if self._gone:
            return
        self._gone = True
        self._disarm()
        self._give_up_push()
        self._frames.clear()
        if self._claim is not None:
            self._pool.release(self._claim)
        self._fates.put_nowait(error)
