"""Every entry of `WIRES` when an end goes away, is closed or falls silent."""

from __future__ import annotations

import asyncio
import gc

import pytest

from hackkv.errors import DeadlineExceeded, FrameRefused, NodeLost
from hackkv.types import Handoff, Receipt
from tests.transport import nouns
from tests.transport.ends import Frames, Reader, Source
from tests.wires import USABLE, WIRES_HERE
from transport.base import KvListener, KvSender
from transport.wires import Loopback


async def test_cancelling_a_push_lets_the_receiver_release_its_pages(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)
    source = Source()
    push = asyncio.create_task(sender.push(address, nouns.handoff(), source.frames()))
    await reader.first.wait()
    await source.blocked.wait()
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    await reader.over.wait()
    assert isinstance(reader.error, NodeLost)
    await source.closed.wait()


async def test_nobody_listens(wire: Loopback, sender: KvSender) -> None:
    listener = wire.listener()
    address = await listener.serve(Reader())
    await listener.close()
    await wire.close()
    source = Source()
    with pytest.raises(NodeLost, match=address):
        await sender.push(address, nouns.handoff(), source.frames())
    assert not source.touched


async def test_closing_the_listener_ends_pushes_with_node_lost(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)
    source = Source()
    push = asyncio.create_task(sender.push(address, nouns.handoff(), source.frames()))
    await reader.first.wait()
    await listener.close()
    assert reader.over.is_set()
    assert isinstance(reader.error, NodeLost)
    with pytest.raises(NodeLost):
        await push
    with pytest.raises(NodeLost):
        await sender.push(address, nouns.handoff(), nouns.frames(1))


async def test_closing_the_sender_ends_pushes_with_node_lost(sender: KvSender, listener: KvListener) -> None:
    reader = Reader()
    address = await listener.serve(reader)
    source = Source()
    push = asyncio.create_task(sender.push(address, nouns.handoff(), source.frames()))
    await reader.first.wait()
    await source.blocked.wait()
    await sender.close()
    with pytest.raises(NodeLost):
        await push
    await reader.over.wait()
    with pytest.raises(NodeLost):
        await sender.push(address, nouns.handoff(), nouns.frames(1))


@pytest.mark.parametrize("name", WIRES_HERE)
async def test_a_sender_that_falls_silent_is_a_deadline_at_the_receiver(name: str) -> None:
    wire = Loopback(name, 0.05)
    sender, listener, reader, source = wire.sender(), wire.listener(), Reader(), Source()
    address = await listener.serve(reader)
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await sender.push(address, nouns.handoff(), source.frames())
    assert isinstance(reader.error, DeadlineExceeded)
    await source.closed.wait()
    await sender.close()
    await listener.close()
    await wire.close()


async def test_a_receiver_that_ignores_the_loss_is_cancelled() -> None:
    for name in USABLE:
        wire = Loopback(name, 0.05)
        sender, listener = wire.sender(), wire.listener()
        stuck, freed = asyncio.Event(), asyncio.Event()

        async def deliver(
            handoff: Handoff, frames: Frames, stuck: asyncio.Event = stuck, freed: asyncio.Event = freed
        ) -> Receipt:
            stuck.set()
            try:
                await asyncio.Event().wait()
            finally:
                freed.set()
            raise AssertionError

        address = await listener.serve(deliver)
        push = asyncio.create_task(sender.push(address, nouns.handoff(), nouns.frames(1)))
        await stuck.wait()
        push.cancel()
        await asyncio.wait({push})
        await freed.wait()
        await sender.close()
        await listener.close()
        await wire.close()


async def test_a_failed_push_leaves_no_task_behind(sender: KvSender, listener: KvListener) -> None:
    async def deliver(handoff: Handoff, frames: Frames) -> Receipt:
        await anext(frames)
        raise FrameRefused("no", reason="checksum")

    address = await listener.serve(deliver)
    for _ in range(20):
        with pytest.raises(FrameRefused):
            await sender.push(address, nouns.handoff(), nouns.frames(2))
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("deliver")] == []
    gc.collect()  # work that was dropped half done would be reported now, and fail the test
