"""A node that has news tells the router at once; without news it renews three times per term."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hackkv.types import Lease, NodeInfo
from tests.transport import nouns
from transport.membership import stay_member
from transport.rpc_server import RpcServer

TERM_S = 3600.0
TIMEOUT_S = 10.0


class Book:
    """A registry that writes down who registers. One term outlives the test: every further call has a reason."""

    def __init__(self) -> None:
        self.entries: asyncio.Queue[NodeInfo] = asyncio.Queue()

    async def register(self, info: NodeInfo) -> Lease:
        """Take note."""
        self.entries.put_nowait(info)
        return Lease(TERM_S)


async def test_news_reaches_the_router_at_once_and_once() -> None:
    book, server = Book(), RpcServer("127.0.0.1", 0)
    server.add_registry(book)
    address = await server.start()
    news, stop = asyncio.Event(), asyncio.Event()

    async def describe() -> NodeInfo:
        return replace(nouns.node_info(), draining=news.is_set())

    staying = asyncio.create_task(stay_member(address, describe, stop, news=news))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert not (await book.entries.get()).draining
            news.set()
            assert (await book.entries.get()).draining
        stop.set()
        await asyncio.wait_for(staying, TIMEOUT_S)
        assert book.entries.empty()
    finally:
        staying.cancel()
        await server.close()
