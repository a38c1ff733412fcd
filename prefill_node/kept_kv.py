"""The frames of one job's KV in host memory until the KV is given up, and the bytes that they claim."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hackkv.types import HandoffEnd, KvFrame
from prefill_node.host_pool import Claim, HostPool, Tenant


class KeptKv:
    """Frames in order, then the end. Once it is `gone` it holds no frames and no memory."""

    def __init__(self, pool: HostPool, num_bytes: int, pushed_out: Callable[[], None]) -> None:
        """`num_bytes` is the most that the KV can take. `pushed_out` is called when another claim pushes the KV out."""
        self._pool, self._num_bytes, self._pushed_out = pool, num_bytes, pushed_out
        self._claim: Claim | None = None
        self._frames: list[KvFrame] = []
        self._grew = asyncio.Event()
        self.end: HandoffEnd | None = None
        self.finished_at = 0.0
        """When token 0 was chosen (perf_counter)."""
        self.gone = False

    def claim_room(self) -> bool:
        """Claim the most host memory that the KV can take; False if there is no room now, or the KV is gone."""
        if self.gone:
            return False
        if self._claim is None:
            self._claim = self._pool.claim(Tenant.WAITING, self._num_bytes, self._pushed_out)
        return self._claim is not None

    def put(self, frame: KvFrame) -> None:
        """Append a frame, and give back the memory that coding saved. Does nothing once the KV is gone."""
        if self.gone:
            return
        self._frames.append(frame)
        self._grew.set()
        if self._claim is not None:
            self._pool.shrink(self._claim, sum(span.raw_bytes - span.coded_bytes for span in frame.planes))

    def finish(self, end: HandoffEnd, finished_at: float) -> None:
        """Append the end: every frame is here."""
        self.end, self.finished_at = end, finished_at
        self._grew.set()

    async def item(self, index: int) -> KvFrame | HandoffEnd:
        """Frame number `index`, or the end after the last frame. Waits until it is there."""
        while index >= len(self._frames):
            if self.end is not None:
                return self.end
            self._grew.clear()
            await self._grew.wait()
        return self._frames[index]

    @property
    def is_kept(self) -> bool:
        """Whether a decode node has the KV, so that the KV may be pushed out here."""
        return self._claim is not None and self._claim.tenant is Tenant.KEPT

    def hold_as(self, tenant: Tenant) -> None:
        """Move the KV's claim to `tenant`, as the youngest of that kind."""
        if self._claim is not None:
            self._pool.change_tenant(self._claim, tenant)

    def drop(self) -> None:
        """Drop the frames and give their memory back."""
        self.gone = True
        self._frames.clear()
        if self._claim is not None:
            self._pool.release(self._claim)
