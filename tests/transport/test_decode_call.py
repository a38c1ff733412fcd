"""Events of a decode node that are handed on as they come equal those of an iterator, in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hackkv.errors import HackkvError, NodeLost, Overloaded
from hackkv.held import NOTHING_HELD
from hackkv.types import Decoded, DecodeEvent, DecodeJob, Reserved, Token
from tests.transport import nouns
from tests.transport.fakes import FakeDecode
from transport import methods
from transport.channels import ChannelPool
from transport.decode_call import DecodeCall
from transport.rpc_client import DecodeClient

TOKENS = 50
EVENTS: list[DecodeEvent] = [
    Reserved(NOTHING_HELD),
    *(Token(index, 7) for index in range(TOKENS)),
    Decoded(0.0, 0.0, 0.0, 0.0),
]


class Node(FakeDecode):
    """Sends some events. The name of the transfer says what follows: the other events, a failure, or nothing."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        """Set when a call is over."""

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        try:
            for event in EVENTS[: TOKENS // 2]:
                yield event
            if job.transfer_id == "fails":
                raise Overloaded("full")
            if job.transfer_id == "hangs":
                await asyncio.Event().wait()
            for event in EVENTS[TOKENS // 2 :]:
                yield event
        finally:
            self.left.set()


@pytest.fixture
async def node() -> Node:
    return Node()


def begin(client: DecodeClient, transfer_id: str) -> DecodeCall:
    call = client.decode(replace(nouns.decode_job(), transfer_id=transfer_id))
    assert isinstance(call, DecodeCall)
    return call


@pytest.mark.parametrize("iterated", [0, 1, 2, 20])
async def test_events_come_in_order_after_those_that_were_iterated(client: DecodeClient, iterated: int) -> None:
    call = begin(client, "ends")
    taken: list[DecodeEvent] = [await anext(call) for _ in range(iterated)]
    await call.each(lambda event: taken.append(event) or False)  # type: ignore[func-returns-value]
    assert taken == EVENTS
    with pytest.raises(StopAsyncIteration):
        await anext(call)
    await call.each(lambda event: pytest.fail(f"{event} came after the end"))


@pytest.mark.parametrize("last", [1, 2, TOKENS])
async def test_nothing_comes_after_the_event_that_was_enough(client: DecodeClient, node: Node, last: int) -> None:
    call, taken = begin(client, "ends"), list[DecodeEvent]()
    taken.append(await anext(call))

    def take(event: DecodeEvent) -> bool:
        taken.append(event)
        return event == EVENTS[last]

    await call.each(take)
    await call.aclose()
    await node.left.wait()
    assert taken == EVENTS[: last + 1]


async def test_a_failure_of_the_node_is_raised_after_what_came_before_it(client: DecodeClient) -> None:
    call = begin(client, "fails")
    taken: list[DecodeEvent] = [await anext(call)]
    with pytest.raises(Overloaded, match="full"):
        await call.each(lambda event: taken.append(event) or False)  # type: ignore[func-returns-value]
    assert taken == EVENTS[: TOKENS // 2]


async def test_what_the_taker_raises_is_raised_and_ends_this_call_only(client: DecodeClient, node: Node) -> None:
    other, call = begin(client, "ends"), begin(client, "hangs")
    assert [await anext(each) for each in (other, call)] == EVENTS[:1] * 2

    def refuse(event: DecodeEvent) -> bool:
        raise HackkvError(f"no {type(event).__name__}")

    with pytest.raises(HackkvError, match="no Token"):
        await call.each(refuse)
    await node.left.wait()
    assert [event async for event in other] == EVENTS[1:]


async def test_a_lost_stream_is_raised(client: DecodeClient, channels: ChannelPool) -> None:
    call = begin(client, "hangs")
    await anext(call)
    reading = asyncio.create_task(call.each(lambda event: False))
    trunk = await channels.trunk(client.address, methods.DECODE_SERVE)
    await asyncio.sleep(0)
    await trunk.close()
    with pytest.raises(NodeLost, match=client.address):
        await reading


async def test_a_reader_that_is_cancelled_takes_nothing_more_and_leaves_the_node(
    client: DecodeClient, node: Node
) -> None:
    call, taken, some = begin(client, "hangs"), list[DecodeEvent](), asyncio.Event()
    await anext(call)

    def take(event: DecodeEvent) -> bool:
        taken.append(event)
        some.set()
        return False

    reading = asyncio.create_task(call.each(take))
    await some.wait()
    reading.cancel()
    seen = len(taken)
    with pytest.raises(asyncio.CancelledError):
        await reading
    await node.left.wait()
    assert len(taken) == seen
