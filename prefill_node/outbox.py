"""The shipments of a prefill node, by transfer id.

HACK, Fig. 5, step 5: compressed KV waits in the prefill node's host memory until a decode node has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hackkv.errors import HandshakeRefused, TransferError
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.types import PrefillJob
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.links import Links
from prefill_node.shipment import FrameKind, Patience, Shipment


class ShipmentOutbox:
    """Every shipment from `open` to `close`."""

    def __init__(
        self,
        links: Links,
        kind: FrameKind,
        pool: HostPool,
        patience: Patience,
        kv_bytes: Callable[[PrefillJob], int],
    ) -> None:
        """`kv_bytes` returns the most payload bytes that a job sends."""
        self.links, self._kind, self._pool, self._patience = links, kind, pool, patience
        self._kv_bytes = kv_bytes
        self._shipments: dict[str, Shipment] = {}
        self.resends = 0
        """Assignments that followed an earlier one."""
        self.dropped = 0
        """Kept KV that made room for other KV."""
        self.refused: Counter[str] = Counter()
        """Assignments that were refused, by reason."""

    @property
    def held_bytes(self) -> int:
        """Host memory that shipments hold, waiting or kept."""
        return self._pool.bytes_of(Tenant.WAITING) + self._pool.bytes_of(Tenant.KEPT)

    def open(self, job: PrefillJob) -> Shipment:
        """A shipment for `job`. Raises `TransferError` when its transfer id is in use."""
        if job.transfer_id in self._shipments:
            raise TransferError(f"transfer {job.transfer_id} is under way already")
        shipment = Shipment(
            job,
            self._kv_bytes(job),
            self._kind,
            self._pool,
            self.links,
            self._patience,
            self._count_dropped,
        )
        self._shipments[job.transfer_id] = shipment
        return shipment

    def assign(self, transfer_id: str, epoch: int, address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a shipment, for the first time or again, and what it holds.

        Raises `HandshakeRefused`.
        """
        shipment = self._shipments.get(transfer_id)
        if shipment is None:
            self.refused["unknown"] += 1
            raise HandshakeRefused(f"transfer {transfer_id} is not known here")
        first = not shipment.was_assigned
        try:
            shipment.assign(epoch, address, held)
        except HandshakeRefused:
            self.refused["gone" if shipment.kv.gone or not shipment.reaches(held) else "stale"] += 1
            raise
        self.resends += not first

    def stop_keeping(self) -> None:
        """Give up the KV of each shipment as soon as a decode node has it."""
        for shipment in self._shipments.values():
            shipment.stop_keeping()

    async def close(self, shipment: Shipment) -> None:
        """End a shipment; returns when none of its pushes is under way."""
        try:
            await shipment.close()
        finally:
            del self._shipments[shipment.transfer_id]

    def _count_dropped(self) -> None:
        self.dropped += 1
