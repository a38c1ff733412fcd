"""A node that has news tells the router at once; without news it renews three times per term."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest

from chaos.loop import run as on_a_virtual_clock
from hackkv.errors import NodeLost
from hackkv.nodes import Lease, NodeInfo
from tests.transport import nouns
from transport import membership
from transport.membership import stay_member
from transport.rpc_server import RpcServer

TERM_S = 3600.0
TIMEOUT_S = 60.0


class Book:
    """A registry that records every registration. One term outlives the test, so any further call is due to news."""

    def __init__(self) -> None:
        self.entries: asyncio.Queue[NodeInfo] = asyncio.Queue()

    async def register(self, info: NodeInfo) -> Lease:
        """Take note."""
        self.entries.put_nowait(info)
        return Lease(TERM_S)


@contextlib.asynccontextmanager
async def member(news: asyncio.Event, stop: asyncio.Event) -> AsyncIterator[tuple[Book, asyncio.Task[None]]]:
    """The task of a node that has registered, and the router's book without that first entry."""
    book, server = Book(), RpcServer("127.0.0.1", 0)
    server.add_registry(book)
    address = await server.start()

    async def describe() -> NodeInfo:
        return replace(nouns.node_info(), draining=news.is_set())

    staying = asyncio.create_task(stay_member(address, describe, stop, news=news))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert not (await book.entries.get()).draining
            yield book, staying
    finally:
        staying.cancel()
        await server.close()


async def test_news_reaches_the_router_at_once_and_once() -> None:
    news, stop = asyncio.Event(), asyncio.Event()
    async with member(news, stop) as (book, staying):
        news.set()
        assert (await book.entries.get()).draining
        stop.set()
        await staying
        assert book.entries.empty()


async def test_news_reaches_the_router_also_from_a_node_that_stops_with_it() -> None:
    news, stop = asyncio.Event(), asyncio.Event()
    async with member(news, stop) as (book, staying):
        news.set()
        stop.set()
        await staying
        assert book.entries.get_nowait().draining
        assert book.entries.empty()


async def test_a_router_that_does_not_answer_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds before the router comes and after it goes. A node that said nothing about a misspelt address would
    look ready."""
    monkeypatch.setattr(membership, "RETRY_S", 0.0)
    answers = iter([None, None, Lease(0.0), None, None])
    over = asyncio.Event()

    class Router:
        async def register(self, _: NodeInfo) -> Lease:
            """The next answer, or none."""
            match next(answers, over):
                case Lease() as lease:
                    return lease
                case None:
                    raise NodeLost("router:1 is silent")
            over.set()
            return Lease(TERM_S)

    async def describe() -> NodeInfo:
        return nouns.node_info()

    staying = asyncio.create_task(membership.keep_registered(Router(), describe, asyncio.Event(), asyncio.Event()))
    async with asyncio.timeout(TIMEOUT_S):
        await over.wait()
    staying.cancel()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["waiting for the router: router:1 is silent", "lost the router: router:1 is silent"]


@pytest.mark.parametrize("back_at", [10.4, 15.2])
def test_a_node_renews_three_times_per_term_and_comes_back_soon_after_its_router(back_at: float) -> None:
    """On a clock that jumps: the node comes back when it would have renewed, or at its next attempt."""
    term_s, away_at, heard = 3.0, 10.2, list[float]()

    class Router:
        async def register(self, _: NodeInfo) -> Lease:
            """Answers, except for a while."""
            now = asyncio.get_running_loop().time()
            if away_at <= now < back_at:
                raise NodeLost("router:1 is silent")
            heard.append(now)
            return Lease(term_s)

    async def describe() -> NodeInfo:
        return nouns.node_info()

    async def stay() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                await membership.keep_registered(Router(), describe, asyncio.Event(), asyncio.Event())

    on_a_virtual_clock(stay())
    before, after = ([now for now in heard if (now < away_at) == early] for early in (True, False))
    assert before == pytest.approx([number * term_s / 3 for number in range(11)])
    assert after[0] - back_at <= max(membership.RETRY_S, term_s / 3)
    assert all(later - now == pytest.approx(term_s / 3) for now, later in pairwise(after))


async def test_a_node_that_stops_without_news_says_nothing_more() -> None:
    news, stop = asyncio.Event(), asyncio.Event()
    async with member(news, stop) as (book, staying):
        stop.set()
        await staying
        assert book.entries.empty()
