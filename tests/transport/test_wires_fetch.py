"""Fetching, the other direction of a wire: its contract, checked for every entry of `WIRES`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hackkv.errors import FrameRefused, HackkvError, HandshakeRefused, NodeLost, TransferError
from hackkv.held import HeldKv
from hackkv.types import Handoff, KvFrame
from tests.transport import nouns
from tests.transport.ends import Frames, Reader
from transport.base import KvListener, KvSender
from transport.closing import closing
from transport.coder import MAX_PAYLOAD_BYTES


async def test_what_is_lent_arrives_in_order(sender: KvSender, listener: KvListener) -> None:
    asked: list[Handoff] = []
    payloads = [bytes([seq]) * (seq * 1000) for seq in range(40)]

    async def lend(handoff: Handoff) -> Frames:
        asked.append(handoff)
        for seq, payload in enumerate(payloads):
            yield nouns.frame(seq, payload)
        yield nouns.end(len(payloads))

    address = await listener.serve(Reader(), lend)
    handoff = replace(nouns.handoff(), held=HeldKv(1))
    items = [item async for item in sender.fetch(address, handoff)]
    bare = [replace(item, header_bytes=0) if isinstance(item, KvFrame) else item for item in items]
    assert bare == [*(nouns.frame(seq, payload) for seq, payload in enumerate(payloads)), nouns.end(40)]
    assert asked == [handoff]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        HandshakeRefused("page_tokens: 64 here, 32 at the peer"),
        TransferError("cancelled\nsecond line “differs”"),
        HackkvError("plain"),
    ],
)
async def test_an_error_of_the_lender_arrives_word_for_word(
    sender: KvSender, listener: KvListener, error: HackkvError, after: int
) -> None:
    async def lend(handoff: Handoff) -> Frames:
        for seq in range(after):
            yield nouns.frame(seq)
        raise error

    address = await listener.serve(Reader(), lend)
    items = sender.fetch(address, nouns.handoff())
    for _ in range(after):
        await anext(items)
    with pytest.raises(type(error)) as raised:
        await anext(items)
    assert (type(raised.value), str(raised.value)) == (type(error), str(error))


async def test_a_fetcher_that_leaves_ends_the_lending(sender: KvSender, listener: KvListener) -> None:
    over = asyncio.Event()

    async def lend(handoff: Handoff) -> Frames:
        try:
            yield nouns.frame(0)
            await asyncio.Event().wait()
        finally:
            over.set()

    address = await listener.serve(Reader(), lend)
    async with closing(sender.fetch(address, nouns.handoff())) as items:
        assert isinstance(await anext(items), KvFrame)
    await asyncio.wait_for(over.wait(), 60)


async def test_a_slow_fetcher_holds_the_lender_up(sender: KvSender, listener: KvListener) -> None:
    """Only frames on their way pile up."""
    lent = 0

    async def lend(handoff: Handoff) -> Frames:
        nonlocal lent
        for seq in range(100):
            lent += 1
            yield nouns.frame(seq, bytes(1 << 20))

    address = await listener.serve(Reader(), lend)
    async with closing(sender.fetch(address, nouns.handoff())) as items:
        await anext(items)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert lent < 50


async def test_a_payload_that_is_too_large_is_refused(sender: KvSender, listener: KvListener) -> None:
    async def lend(handoff: Handoff) -> Frames:
        yield nouns.frame(0, bytes(MAX_PAYLOAD_BYTES + 1))

    address = await listener.serve(Reader(), lend)
    with pytest.raises(FrameRefused, match=f"at most {MAX_PAYLOAD_BYTES} are accepted"):
        await anext(sender.fetch(address, nouns.handoff()))


async def test_nobody_lends_at_an_address_that_only_listens(sender: KvSender, listener: KvListener) -> None:
    address = await listener.serve(Reader())
    with pytest.raises(HackkvError):
        await anext(sender.fetch(address, nouns.handoff()))


async def test_a_fetch_on_a_closed_sender_is_lost(sender: KvSender, listener: KvListener) -> None:
    address = await listener.serve(Reader(), lambda handoff: nouns.frames(2))
    await sender.close()
    with pytest.raises(NodeLost):
        await anext(sender.fetch(address, nouns.handoff()))
