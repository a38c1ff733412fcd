"""What waits in host memory is counted to the byte, and nothing is counted that nobody will send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hackkv.errors import HandshakeRefused, NodeLost
from hackkv.types import Fingerprint, Handoff, HandoffEnd, KvFrame, PrefillJob, Receipt
from prefill_node.outbox import Outbox
from tests.pair import TIMEOUT_S, greedy
from transport.wires import WIRES

RECEIPT = Receipt("t", 3, (), 0, 0, 0.0)
JOB = PrefillJob(greedy("r", (5, 6, 7), 4), "t", 0)


def frame(seq: int, size: int) -> KvFrame:
    return KvFrame("t", 0, seq, 0, 0, 1, 0, 1, 0, (), bytes(size))


class Bench:
    """An outbox of 100 bytes, and a receiver that takes everything."""

    def __init__(self) -> None:
        self.wire = WIRES["inproc"](TIMEOUT_S)
        self.rooms = 0
        self.outbox = Outbox(self.wire.sender(), Fingerprint(()), 100, self.on_room)
        self.listener = self.wire.listener()
        self.taken: list[int] = []

    def on_room(self) -> None:
        self.rooms += 1

    async def deliver(self, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        async for item in frames:
            if isinstance(item, KvFrame):
                self.taken.append(len(item.payload))
        return RECEIPT


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_bytes_are_held_until_they_leave_and_room_is_announced_once(bench: Bench) -> None:
    address = await bench.listener.serve(bench.deliver)
    shipment = bench.outbox.open(JOB)
    delivery = asyncio.create_task(shipment.deliver())
    for seq, size in enumerate((60, 39, 1)):
        assert bench.outbox.has_room
        shipment.put(frame(seq, size))
    assert (bench.outbox.held_bytes, bench.outbox.has_room) == (100, False)
    shipment.assign(address)
    shipment.put(HandoffEnd("t", 0, 3, 9, checksum=0))
    assert await delivery == RECEIPT
    assert (bench.taken, shipment.sent_bytes, bench.outbox.held_bytes, bench.rooms) == ([60, 39, 1], 100, 0, 1)
    with pytest.raises(HandshakeRefused):
        bench.outbox.find("t", 0)


@pytest.mark.parametrize("how", ["cancelled", "lost"])
async def test_frames_that_come_after_a_delivery_failed_are_dropped(bench: Bench, how: str) -> None:
    """The engine's thread does not know yet: what it still emits must not count as waiting for ever."""
    shipment = bench.outbox.open(JOB)
    delivery = asyncio.create_task(shipment.deliver())
    shipment.put(frame(0, 150))
    await asyncio.sleep(0)
    if how == "cancelled":
        delivery.cancel()
    else:
        shipment.assign("nowhere")
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else NodeLost):
        await delivery
    assert (bench.outbox.held_bytes, bench.rooms) == (0, 1)
    shipment.put(frame(1, 150))
    assert (bench.outbox.held_bytes, bench.outbox.has_room) == (0, True)
