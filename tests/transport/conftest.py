"""Wires with both ends, and services with their clients."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.transport.ends import FRAME_TIMEOUT_S
from tests.transport.fakes import Cluster, FakeDecode, FakePrefill, FakeRegistry
from tests.wires import EVERY_LINK, LINKS_HERE, WIRES_HERE
from transport.base import DecodeNode, KvListener, KvSender
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient, RegistryClient
from transport.rpc_server import RpcServer
from transport.wires import WIRES, Loopback, linked


@pytest.fixture(params=[*WIRES_HERE, *(EVERY_LINK.keys() - set(LINKS_HERE))])
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Loopback]:
    wire = WIRES.get(request.param) or linked(lambda _: EVERY_LINK[request.param]())
    made = Loopback(wire, FRAME_TIMEOUT_S)
    yield made
    await made.close()


@pytest.fixture
async def sender(wire: Loopback) -> AsyncIterator[KvSender]:
    made = wire.sender()
    yield made
    await made.close()


@pytest.fixture
async def listener(wire: Loopback) -> AsyncIterator[KvListener]:
    made = wire.listener()
    yield made
    await made.close()


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    made = RpcServer("127.0.0.1", 0)
    yield made
    await made.close()


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    made = ChannelPool()
    yield made
    await made.close()


@pytest.fixture
async def client(server: RpcServer, node: DecodeNode, channels: ChannelPool) -> DecodeClient:
    """A client of the decode node that is the module's fixture `node`."""
    server.add_decode(node)
    return DecodeClient(await server.start(), channels)


@pytest.fixture
async def remote(server: RpcServer, channels: ChannelPool) -> Cluster:
    fake = FakePrefill()
    server.add_prefill(fake)
    server.add_decode(FakeDecode())
    server.add_registry(FakeRegistry())
    address = await server.start()
    return Cluster(
        fake,
        PrefillClient(address, channels),
        DecodeClient(address, channels),
        RegistryClient(address, channels),
    )


@pytest.fixture(params=["direct", "grpc"])
async def cluster(request: pytest.FixtureRequest, remote: Cluster) -> Cluster:
    if request.param == "grpc":
        return remote
    return Cluster(remote.fake, remote.fake, FakeDecode(), FakeRegistry())
