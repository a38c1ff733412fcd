"""Items that come together leave together, in order, in messages of a bounded size."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from transport.outbox import MESSAGE_BYTES, WAITING_BYTES, StreamOutbox


class Peer:
    """Takes messages while `takes` is set."""

    def __init__(self, lives: int = 1 << 30) -> None:
        self.messages: list[list[int]] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self._took = asyncio.Event()
        self._lives = lives

    async def take(self, items: list[int]) -> bool:
        await self.takes.wait()
        self.messages.append(items)
        self._took.set()
        return len(self.messages) < self._lives

    async def have(self, count: int) -> None:
        """Wait until the peer has `count` items."""
        while sum(map(len, self.messages)) < count:
            self._took.clear()
            await self._took.wait()


async def sent(sizes: list[int]) -> list[list[int]]:
    """The messages that carry items of these sizes, which come together. Items are their sizes."""
    peer = Peer()
    outbox = StreamOutbox[int](peer.take)
    running = asyncio.create_task(outbox.run())
    for size in sizes:
        outbox.put(size, size)
    await peer.have(len(sizes))
    outbox.end()
    await running
    return peer.messages


@given(st.lists(st.integers(0, MESSAGE_BYTES * 3 // 2), min_size=1, max_size=30))
def test_items_stay_in_order_and_messages_stay_small(sizes: list[int]) -> None:
    messages = asyncio.run(sent(sizes))
    assert [item for message in messages for item in message] == sizes
    assert all(len(message) == 1 or sum(message) <= MESSAGE_BYTES for message in messages)
    if sum(sizes) + 100 * len(sizes) < MESSAGE_BYTES:
        assert len(messages) == 1


async def test_what_has_time_leaves_with_the_next_or_alone() -> None:
    peer = Peer()
    outbox = StreamOutbox[int](peer.take)
    running = asyncio.create_task(outbox.run())
    outbox.put(1, 1, soon=False)
    outbox.put(2, 1, soon=False)
    outbox.put(3, 1)
    await peer.have(3)
    outbox.put(4, 1, soon=False)
    await peer.have(4)
    assert peer.messages == [[1, 2, 3], [4]]
    outbox.end()
    await running


async def test_a_peer_that_takes_nothing_holds_up_whoever_adds() -> None:
    peer = Peer()
    outbox = StreamOutbox[int](peer.take)
    running = asyncio.create_task(outbox.run())
    peer.takes.clear()
    outbox.put(0, 1)
    await asyncio.sleep(0)
    await outbox.room()
    outbox.put(1, WAITING_BYTES)
    waiting = asyncio.create_task(outbox.room())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    peer.takes.set()
    await waiting
    outbox.end()
    await running


async def test_the_end_of_the_stream_ends_the_sending() -> None:
    peer = Peer(lives=1)
    outbox = StreamOutbox[int](peer.take)
    outbox.put(1, 1)
    await outbox.run()
    assert peer.messages == [[1]]
