"""The contract of a wire, checked for every entry of `WIRES`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hackkv.errors import FrameRefused, HackkvError, HandshakeRefused, NodeLost, TransferError
from hackkv.types import Handoff, KvFrame, Receipt
from tests.transport import nouns
from tests.transport.ends import Frames, Reader, Source
from transport.base import KvListener, KvSender
from transport.coder import MAX_PAYLOAD_BYTES


async def test_frames_arrive_in_order_and_the_receipt_comes_back(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)
    payloads = [bytes([seq]) * (seq * 1000) for seq in range(40)]

    async def frames() -> Frames:
        for seq, payload in enumerate(payloads):
            yield nouns.frame(seq, payload)
        yield nouns.end(len(payloads))

    receipt = await sender.push(address, nouns.handoff(), frames())
    assert receipt == nouns.receipt(tokens=41)
    bare = [
        replace(item, header_bytes=0, payload=bytes(item.payload)) if isinstance(item, KvFrame) else item
        for item in reader.items
    ]
    assert bare == [*(nouns.frame(seq, payload) for seq, payload in enumerate(payloads)), nouns.end(40)]
    assert all(item.header_bytes < 64 for item in reader.items if isinstance(item, KvFrame))


async def test_no_frame_is_touched_before_the_receiver_asks(sender: KvSender, listener: KvListener) -> None:
    ready, go = asyncio.Event(), asyncio.Event()

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        ready.set()
        await go.wait()
        return await Reader()(handoff, frames)

    address = await listener.serve(deliver)
    source = Source()
    push = asyncio.create_task(sender.push(address, nouns.handoff(), source.frames()))
    await ready.wait()
    assert not source.touched
    go.set()
    await source.blocked.wait()
    push.cancel()
    await asyncio.wait({push})
    assert push.cancelled()


@pytest.mark.parametrize(
    "error",
    [
        HandshakeRefused("page_tokens: 64 here, 32 at the peer"),
        FrameRefused("frame 3: checksum of plane k.codes — “differs”", reason="checksum"),
        TransferError("stale epoch\nsecond line"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_before_the_first_frame_arrives_word_for_word(
    sender: KvSender, listener: KvListener, error: HackkvError
) -> None:
    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        raise error

    address = await listener.serve(deliver)
    source = Source()
    with pytest.raises(type(error)) as caught:
        await sender.push(address, nouns.handoff(), source.frames())
    assert str(caught.value) == str(error)
    assert getattr(caught.value, "reason", None) == getattr(error, "reason", None)
    assert not source.touched


async def test_a_corrupt_frame_stops_a_sender_that_is_blocked(sender: KvSender, listener: KvListener) -> None:
    source = Source(before_block=3)

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        for _ in range(3):
            await anext(frames)
        ahead = asyncio.ensure_future(anext(frames))  # the in-process wire pulls on demand, so this call blocks there
        await source.blocked.wait()
        ahead.cancel()
        raise FrameRefused("frame 2 of t-1: plane k.min does not match its checksum", reason="checksum")

    address = await listener.serve(deliver)
    push = asyncio.create_task(sender.push(address, nouns.handoff(), source.frames()))
    with pytest.raises(FrameRefused, match=r"plane k\.min does not match") as caught:
        await push
    assert caught.value.reason == "checksum"
    await source.closed.wait()


async def test_an_unexpected_exception_of_the_receiver_is_internal_and_logged(
    sender: KvSender, listener: KvListener, caplog: pytest.LogCaptureFixture
) -> None:
    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        await anext(frames)
        raise ZeroDivisionError("secret detail")

    address = await listener.serve(deliver)
    with pytest.raises(HackkvError, match="ZeroDivisionError") as caught:
        await sender.push(address, nouns.handoff(), nouns.frames(3))
    assert caught.value.code == "internal"
    assert "secret detail" in caplog.text
    assert "secret detail" not in str(caught.value)


async def test_a_source_that_raises_fails_the_push_and_reaches_the_receiver(
    sender: KvSender, listener: KvListener
) -> None:
    reader = Reader()
    address = await listener.serve(reader)

    async def frames() -> Frames:
        yield nouns.frame(0)
        await reader.first.wait()
        raise ArithmeticError("the encoder broke")

    with pytest.raises(ArithmeticError, match="the encoder broke"):
        await sender.push(address, nouns.handoff(), frames())
    await reader.over.wait()
    assert isinstance(reader.error, NodeLost)


async def test_a_source_that_ends_early_is_a_transfer_error(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)

    async def frames() -> Frames:
        yield nouns.frame(0)

    with pytest.raises(TransferError, match="without a HandoffEnd"):
        await sender.push(address, nouns.handoff(), frames())
    await reader.over.wait()
    assert isinstance(reader.error, NodeLost)


async def test_a_receiver_that_reads_slowly_holds_the_sender_back(sender: KvSender, listener: KvListener) -> None:
    count, payload, produced, done = 128, bytes(1 << 20), 0, asyncio.Event()
    go = asyncio.Event()

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        await anext(frames)
        await go.wait()
        return await Reader()(handoff, frames)

    async def frames() -> Frames:
        nonlocal produced
        for seq in range(count):
            produced = seq + 1
            yield nouns.frame(seq, payload)
        done.set()
        yield nouns.end(count)

    address = await listener.serve(deliver)
    push = asyncio.create_task(sender.push(address, nouns.handoff(), frames()))
    with pytest.raises(TimeoutError):  # this event must not come, however long we wait
        await asyncio.wait_for(done.wait(), 0.5)
    assert produced <= 24
    go.set()
    assert (await push).tokens == count  # one was read by hand, the end is counted


async def test_fifty_pushes_at_once_do_not_mix(sender: KvSender, listener: KvListener) -> None:
    meeting = asyncio.Barrier(50)

    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        await anext(frames)
        await meeting.wait()
        total = 1
        async for item in frames:
            assert item.transfer_id == handoff.transfer_id
            total += 1
        return nouns.receipt(handoff.transfer_id, total)

    address = await listener.serve(deliver)
    ids = [f"t-{number}" for number in range(50)]
    pushes = (
        sender.push(address, nouns.handoff(i), nouns.frames(number, transfer_id=i)) for number, i in enumerate(ids, 1)
    )
    receipts = await asyncio.gather(*pushes)
    assert [(r.transfer_id, r.tokens) for r in receipts] == [(i, number + 1) for number, i in enumerate(ids, 1)]


async def test_a_frame_beyond_the_cap_is_refused_by_name(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)
    full = await sender.push(address, nouns.handoff(), nouns.frames(1, bytes(MAX_PAYLOAD_BYTES)))
    assert full.tokens == 2
    with pytest.raises(FrameRefused, match=str(MAX_PAYLOAD_BYTES)) as caught:
        await sender.push(address, nouns.handoff(), nouns.frames(1, bytes(MAX_PAYLOAD_BYTES + 1)))
    assert caught.value.reason == "oversized"


class Elsewhere:
    """A payload that is not in host memory until its bytes are asked for."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __bytes__(self) -> bytes:
        return self._content


async def test_a_payload_need_not_lie_in_host_memory(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)

    async def frames() -> Frames:
        yield replace(nouns.frame(0), payload=Elsewhere(b"codes"))
        yield nouns.end(1)

    await sender.push(address, nouns.handoff(), frames())
    arrived = reader.items[0]
    assert isinstance(arrived, KvFrame)
    assert (len(arrived.payload), bytes(arrived.payload)) == (5, b"codes")
