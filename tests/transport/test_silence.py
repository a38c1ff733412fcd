"""A peer that falls silent is noticed by both ends."""

from __future__ import annotations

import asyncio

import pytest

from hackkv.errors import (
    NodeLost,
)
from tests.transport import nouns
from tests.transport.fakes import PREFILL_EVENTS, FakePrefill
from transport.channels import ChannelPool, Keepalive
from transport.rpc_client import PrefillClient
from transport.rpc_server import RpcServer

UNCONFIGURED_S = 55.0
"""Less than the 60 s after which gRPC gives a peer up if `ping_timeout_ms` is not set."""


class Relay:
    """A TCP relay that can go silent without closing anything, as a machine that lost power does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._awake = asyncio.Event()
        self._awake.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def go_silent(self) -> None:
        self._awake.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, back_writer), (back_reader, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, sink)))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._awake.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


async def test_a_silent_peer_is_noticed_on_both_ends() -> None:
    keepalive = Keepalive(time_s=0.2, timeout_s=3.0)
    server, channels, fake = RpcServer("127.0.0.1", 0, keepalive=keepalive), ChannelPool(keepalive), FakePrefill()
    fake.hang = True
    server.add_prefill(fake)
    relay = Relay(int((await server.start()).rpartition(":")[2]))
    address = await relay.start()
    events = PrefillClient(address, channels).prefill(nouns.prefill_job())
    for event in PREFILL_EVENTS:
        assert await anext(events) == event
    relay.go_silent()
    async with asyncio.timeout(UNCONFIGURED_S):
        with pytest.raises(NodeLost, match=address):
            await anext(events)
        await fake.closed.wait()
    await channels.close()
    await server.close()
    await relay.close()
