"""An outbox and two decode nodes that receive its pushes. Fixtures for tests of shipments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from hack_kernels.base import Plane
from hack_kernels.window import OWN_PAGE_ONLY

from hackkv.expected import Expected
from hackkv.footprint import Footprint
from hackkv.framing import FrameWriter
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, KvLayout, PrefillJob, Receipt
from hackkv.wire_form import RAW, Bytes, WireForm
from prefill_node.host_pool import HostPool, Tenant
from prefill_node.links import Links
from prefill_node.outbox import ShipmentOutbox
from prefill_node.shipment import FrameKind, Patience, Shipment
from tests.pair import TIMEOUT_S, greedy
from transport.base import KvListener
from transport.wires import Loopback

FRAMES, FRAME_BYTES = 3, 64
KV_BYTES = FRAMES * FRAME_BYTES
TOKEN = 9
PLANES = ((Plane("k", torch.uint8, (FRAME_BYTES,)),),) * FRAMES
SIZES = Footprint(1, page_bytes=KV_BYTES, wire_page_bytes=KV_BYTES, row_bytes=0, window=OWN_PAGE_ONLY)
KIND = FrameKind(Fingerprint(()), Expected(KvLayout(FRAMES, 1, FRAME_BYTES, 1), PLANES, 0, SIZES))
PATIENCE = Patience(unassigned_s=300.0, kept_s=1800.0)


class Halving:
    """A wire form for planes whose bytes are all equal. It sends half of them."""

    name, method = "halving", 201

    def cap(self, raw_bytes: int) -> int:
        """Half of the raw size."""
        return raw_bytes // 2

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """The first half of the plane."""
        return plane[: plane.size // 2].tobytes()

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """Fill the plane with the first byte."""
        plane[:] = coded[0]


def frames(name: str, epoch: int, form: WireForm = RAW) -> list[KvFrame]:
    """The frames that an engine would write: one page of one plane for each of three layers."""
    writer = FrameWriter(name, epoch, form)
    pages = [torch.full((1, 1, FRAME_BYTES), layer, dtype=torch.uint8) for layer in range(FRAMES)]
    return [next(writer.frames(layer, 0, [{"k": page}])) for layer, page in enumerate(pages)]


def end(name: str, epoch: int) -> HandoffEnd:
    writer = FrameWriter(name, epoch)
    for layer in range(FRAMES):
        next(writer.frames(layer, 0, [{"k": torch.zeros((1, 1, 1))}]))
    return writer.end(TOKEN)


@dataclass(eq=False)
class Receiver:
    """A decode node that accepts every handoff. It waits after each frame while a test has its gate closed."""

    listener: KvListener
    address: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a frame has arrived."""
    taken: list[list[KvFrame | HandoffEnd]] = field(default_factory=list)
    error: Exception | None = None

    async def deliver(self, handoff: Handoff, items: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Receive a handoff."""
        taken = []
        async for item in items:
            taken.append(item)
            self.reached.set()
            await self.gate.wait()
        if self.error:
            raise self.error
        self.taken.append(taken)
        return Receipt(handoff.transfer_id, handoff.num_tokens, (), 0, 0, 0.0)


class Bench:
    """An outbox with host memory for `room` requests, and two decode nodes."""

    def __init__(self, room: int, patience: Patience) -> None:
        wire = Loopback("inproc", TIMEOUT_S)
        self.left = 0
        """Bytes that ceased to wait."""
        self.pool = HostPool(room * KV_BYTES, self._on_left)
        self.sender = wire.sender()
        self.outbox = ShipmentOutbox(Links(self.sender, RAW), KIND, self.pool, patience, lambda _: KV_BYTES)
        self.first, self.second = (Receiver(wire.listener()) for _ in range(2))

    async def start(self) -> None:
        """Open both gates and listen."""
        for node in (self.first, self.second):
            node.address = await node.listener.serve(node.deliver)
            node.gate.set()

    def open(self, name: str, epoch: int = 0, address: str = "", *, filled: int = FRAMES) -> Shipment:
        """A shipment with a claim on host memory and its first `filled` frames; if these are all, also its end."""
        shipment = self.outbox.open(PrefillJob(greedy(name, (5, 6, 7), 4), name, epoch, address))
        assert shipment.kv.claim_room()
        for frame in frames(name, epoch)[:filled]:
            shipment.kv.put(frame)
        if filled == FRAMES:
            shipment.finish(end(name, epoch), finished_at=0.0)
        return shipment

    def _on_left(self, num_bytes: int) -> None:
        self.left += num_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of KV that waits or is kept."""
        return self.pool.bytes_of(Tenant.WAITING) + self.pool.bytes_of(Tenant.KEPT)

    @property
    def held(self) -> tuple[int, int]:
        """The numbers of requests whose KV waits and whose KV is kept."""
        waiting, kept = (self.pool.bytes_of(tenant) // KV_BYTES for tenant in (Tenant.WAITING, Tenant.KEPT))
        return waiting, kept


@asynccontextmanager
async def benched(room: int = 2, patience: Patience = PATIENCE) -> AsyncIterator[Bench]:
    bench = Bench(room, patience)
    await bench.start()
    yield bench
    await bench.sender.close()
    for node in (bench.first, bench.second):
        await node.listener.close()
