"""Calls that share a stream do not share their fates, unless the stream itself is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from hackkv.errors import NodeLost, Overloaded, RequestError, TransferError
from hackkv.held import HeldKv
from hackkv.types import Decoded, DecodeEvent, DecodeJob, Reserved, Token
from tests.transport import nouns
from tests.transport.fakes import FakeDecode
from transport import methods, trunk_server
from transport.channels import ChannelPool
from transport.convert import DECODE_JOB
from transport.convert_calls import ANSWERS, ASKS, Answer, Ask
from transport.rpc_client import DecodeClient
from transport.status import rebuild

FULL, HANGS, TOKENS = "full", "hangs", 50


class Node(FakeDecode):
    """A decode node that acts by the name of the transfer."""

    def __init__(self) -> None:
        self.under_way: set[str] = set()
        self.changed = asyncio.Event()

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        self.under_way.add(job.transfer_id)
        try:
            yield Reserved(HeldKv(job.epoch))
            if job.transfer_id == FULL:
                raise Overloaded("full")
            if job.transfer_id.startswith(HANGS):
                await asyncio.Event().wait()
            for index in range(TOKENS):
                yield Token(index, job.epoch)
            yield Decoded(0.0, 0.0, 0.0, 0.0)
        finally:
            self.under_way.discard(job.transfer_id)
            self.changed.set()

    async def empty(self) -> None:
        """Wait until no call is under way."""
        while self.under_way:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
async def node() -> Node:
    return Node()


def job(transfer_id: str, epoch: int = 0) -> DecodeJob:
    return replace(nouns.decode_job(), transfer_id=transfer_id, epoch=epoch)


async def test_each_call_gets_its_own_events(client: DecodeClient, channels: ChannelPool) -> None:
    async def run(epoch: int) -> None:
        first, *tokens, last = [event async for event in client.decode(job(f"t-{epoch}", epoch))]
        assert first == Reserved(HeldKv(epoch))
        assert tokens == [Token(index, epoch) for index in range(TOKENS)]
        assert isinstance(last, Decoded)

    trunk = await channels.trunk(client.address, methods.DECODE_SERVE)
    await asyncio.gather(*map(run, range(20)))
    assert await channels.trunk(client.address, methods.DECODE_SERVE) is trunk


async def test_a_call_that_fails_or_is_left_leaves_the_others_alone(client: DecodeClient, node: Node) -> None:
    staying, leaving, failing = (client.decode(job(name)) for name in (HANGS, f"{HANGS} too", FULL))
    for call in (staying, leaving, failing):
        assert isinstance(await anext(call), Reserved)
    with pytest.raises(Overloaded, match="full"):
        await anext(failing)
    with pytest.raises(StopAsyncIteration):
        await anext(failing)
    await leaving.aclose()  # type: ignore[attr-defined]
    with pytest.raises(StopAsyncIteration):
        await anext(leaving)
    while node.under_way != {HANGS}:
        node.changed.clear()
        await node.changed.wait()
    with pytest.raises(RequestError):  # the job never leaves the caller
        await anext(client.decode(job("\ud800")))
    await staying.aclose()  # type: ignore[attr-defined]
    await node.empty()


async def test_a_lost_stream_ends_every_call_and_the_next_call_opens_another(
    client: DecodeClient, node: Node, channels: ChannelPool
) -> None:
    calls = [client.decode(job(f"{HANGS} {index}")) for index in range(3)]
    for call in calls:
        assert isinstance(await anext(call), Reserved)
    trunk = await channels.trunk(client.address, methods.DECODE_SERVE)
    await trunk.close()
    for call in calls:
        with pytest.raises(NodeLost, match=client.address):
            await anext(call)
    await node.empty()
    assert isinstance(await anext(client.decode(job(HANGS))), Reserved)


async def raw(address: str, *messages: bytes, answers: int) -> list[Answer]:
    """The first `answers` answers of a node to messages that are sent as they are."""
    got: list[Answer] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(methods.DECODE_SERVE, None, None)(None)
        for message in messages:
            await stream.write(message)
        try:
            while len(got) < answers:
                data = await stream.read()
                assert isinstance(data, bytes)
                got += ANSWERS.decode(data)
        except grpc.aio.AioRpcError as error:
            raise rebuild(error, address) from error
    return got


async def test_a_malformed_job_fails_alone(client: DecodeClient) -> None:
    good = Ask(2, DECODE_JOB.encode(job(FULL)))
    refused, reserved, full = await raw(client.address, ASKS.encode([Ask(1, b"\xff"), Ask(9), good]), answers=3)
    assert isinstance(refused.body, RequestError)
    assert (reserved.call, full.call) == (2, 2)
    assert isinstance(full.body, Overloaded)


@pytest.mark.parametrize(
    ("messages", "why"), [([b"\xff"], "malformed Asks"), ([ASKS.encode([Ask(1, b""), Ask(1, b"")])], "has begun")]
)
async def test_who_breaks_the_protocol_loses_the_stream(client: DecodeClient, messages: list[bytes], why: str) -> None:
    with pytest.raises(TransferError, match=why):
        await raw(client.address, *messages, answers=99)


async def test_calls_on_a_stream_are_bounded(client: DecodeClient, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_server, "MOST_CALLS", 2)
    calls = [client.decode(job(f"{HANGS} {index}")) for index in range(2)]
    for call in calls:
        await anext(call)
    with pytest.raises(Overloaded, match="2 calls"):
        await anext(client.decode(job("one more")))
    for call in calls:
        await call.aclose()  # type: ignore[attr-defined]
    await node.empty()
