"""Compressed KV on its way out: frames wait here, in host memory, until their decode node takes them.

A shipment opens with its request and is filled layer by layer while prefill runs. If its decode node is known it leaves
as it is filled; if not, it waits for `assign` (HACK, Fig. 5, step 5). `Outbox` counts what waits, so that the scheduler
starts no further prompt when host memory is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter

from hackkv.errors import HandshakeRefused, TransferError
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, PrefillJob, Receipt
from transport.base import KvSender


class Shipment:
    """The frames of one handoff. All methods belong to the event loop's thread."""

    def __init__(self, outbox: Outbox, handoff: Handoff, address: str) -> None:
        self._outbox = outbox
        self._handoff = handoff
        self._frames: asyncio.Queue[KvFrame | HandoffEnd] = asyncio.Queue()
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._held_bytes = 0
        self._over = False
        self.sent_bytes = 0
        """Payload bytes handed to the wire so far."""
        self.assigned_at: float | None = None
        if address:
            self.assign(address)

    @property
    def epoch(self) -> int:
        """The attempt that this is."""
        return self._handoff.epoch

    def assign(self, address: str) -> None:
        """Name the decode node. Raises `TransferError` when it was named before."""
        if self._address.done():
            raise TransferError(f"transfer {self._handoff.transfer_id} was assigned before")
        self.assigned_at = perf_counter()
        self._address.set_result(address)

    def put(self, item: KvFrame | HandoffEnd) -> None:
        """Append a frame, or the end; without effect when the delivery is over."""
        if self._over:
            return
        if isinstance(item, KvFrame):
            self._hold(len(item.payload))
        self._frames.put_nowait(item)

    async def deliver(self) -> Receipt:
        """Send everything; returns when the decode node has committed. Raises `TransferError` or `NodeLost`."""
        try:
            address = await self._address
            return await self._outbox.sender.push(address, self._handoff, self._leaving())
        finally:
            self._over = True
            self._hold(-self._held_bytes)
            self._outbox.forget(self._handoff.transfer_id)

    async def _leaving(self) -> AsyncIterator[KvFrame | HandoffEnd]:
        while True:
            item = await self._frames.get()
            if isinstance(item, KvFrame):
                self._hold(-len(item.payload))
                self.sent_bytes += len(item.payload)
            yield item
            if isinstance(item, HandoffEnd):
                return

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self._outbox.hold(num_bytes)


class Outbox:
    """All shipments of a prefill node; `held_bytes` of payload wait in host memory."""

    def __init__(
        self, sender: KvSender, fingerprint: Fingerprint, capacity_bytes: int, on_room: Callable[[], None]
    ) -> None:
        """`on_room` is called when there is room again after there was none."""
        self.sender = sender
        self.held_bytes = 0
        self._fingerprint = fingerprint
        self._capacity_bytes = capacity_bytes
        self._on_room = on_room
        self._shipments: dict[str, Shipment] = {}

    @property
    def has_room(self) -> bool:
        """Whether another prompt may start."""
        return self.held_bytes < self._capacity_bytes

    def hold(self, num_bytes: int) -> None:
        """Count bytes that begin (or, negative, cease) to wait."""
        had_room = self.has_room
        self.held_bytes += num_bytes
        if self.has_room and not had_room:
            self._on_room()

    def open(self, job: PrefillJob) -> Shipment:
        """A shipment for `job`. Raises `TransferError` when its transfer id is in use."""
        if job.transfer_id in self._shipments:
            raise TransferError(f"transfer {job.transfer_id} is under way already")
        handoff = Handoff(job.transfer_id, job.epoch, self._fingerprint, len(job.request.prompt_ids))
        shipment = Shipment(self, handoff, job.decode_address)
        self._shipments[job.transfer_id] = shipment
        return shipment

    def find(self, transfer_id: str, epoch: int) -> Shipment:
        """The shipment of a transfer. Raises `HandshakeRefused` when there is none of that epoch."""
        shipment = self._shipments.get(transfer_id)
        if shipment is None or shipment.epoch != epoch:
            raise HandshakeRefused(f"transfer {transfer_id}, epoch {epoch} is not known here")
        return shipment

    def forget(self, transfer_id: str) -> None:
        """Drop a shipment's name; harmless when it is gone."""
        self._shipments.pop(transfer_id, None)
