"""The node protocols, called directly and over gRPC: a caller must not be able to tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest

from hackkv.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    HackkvError,
    HandshakeRefused,
    NodeLost,
    NonFiniteError,
    Overloaded,
    RequestError,
    TransferError,
    Unavailable,
)
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    Finish,
    HandedOff,
    HandoffFailed,
    Landed,
    Lease,
    NodeInfo,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Reserved,
    Swapped,
    Token,
)
from tests.transport import nouns
from transport.base import DecodeNode, PrefillNode, Registry
from transport.channels import ChannelPool, Keepalive
from transport.pb import kv_pb2, kv_pb2_grpc
from transport.rpc_client import DecodeClient, PrefillClient, RegistryClient
from transport.rpc_server import RpcServer

PREFILL_EVENTS: list[PrefillEvent] = [
    Prefilled(Token(0, 11, None, -0.5), 0.1, 0.2, 0.05, 3),
    HandoffFailed(0, "node_lost", "d-1 went away"),
    HandedOff(nouns.receipt(), 0.0, 0.3, 512, epoch=1),
]
DECODE_EVENTS: list[DecodeEvent] = [
    Reserved(),
    Landed(nouns.receipt()),
    Token(1, 12),
    Swapped(),
    Token(2, 13, Finish.STOP),
    Decoded(0.1, 0.2, 0.1, 0.01),
]


class FakePrefill:
    """Plays its events; raises `error` after them."""

    def __init__(self) -> None:
        self.events: list[PrefillEvent] = PREFILL_EVENTS
        self.error: Exception | None = None
        self.hang = False
        self.jobs: list[PrefillJob] = []
        self.assigned: list[tuple[str, int, str]] = []
        self.closed = asyncio.Event()

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        self.jobs.append(job)
        try:
            for event in self.events:
                yield event
            if self.hang:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()

    async def assign(self, transfer_id: str, epoch: int, decode_address: str) -> None:
        if self.error is not None:
            raise self.error
        self.assigned.append((transfer_id, epoch, decode_address))

    async def describe(self) -> NodeInfo:
        if self.hang:
            await asyncio.Event().wait()
        return nouns.node_info("p-1")


class FakeDecode:
    """Plays its events."""

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        for event in DECODE_EVENTS:
            yield event

    async def describe(self) -> NodeInfo:
        return nouns.node_info()


class FakeRegistry:
    """Grants a lease."""

    async def register(self, info: NodeInfo) -> Lease:
        if info != nouns.node_info():
            raise HandshakeRefused("node_id: 'd-1' here")
        return Lease(3.5)


@dataclass(frozen=True)
class Cluster:
    """A caller's view of the three services, and the implementation behind the prefill node."""

    fake: FakePrefill
    prefill: PrefillNode
    decode: DecodeNode
    registry: Registry


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
async def remote(server: RpcServer, channels: ChannelPool) -> Cluster:
    fake = FakePrefill()
    server.add_prefill(fake)
    server.add_decode(FakeDecode())
    server.add_registry(FakeRegistry())
    address = await server.start()
    return Cluster(
        fake,
        PrefillClient(address, channels, timeout_s=0.5),
        DecodeClient(address, channels),
        RegistryClient(address, channels),
    )


@pytest.fixture(params=["direct", "grpc"])
async def cluster(request: pytest.FixtureRequest, remote: Cluster) -> Cluster:
    if request.param == "grpc":
        return remote
    return Cluster(remote.fake, remote.fake, FakeDecode(), FakeRegistry())


async def test_prefill_yields_its_events(cluster: Cluster) -> None:
    assert [event async for event in cluster.prefill.prefill(nouns.prefill_job())] == PREFILL_EVENTS
    assert cluster.fake.jobs == [nouns.prefill_job()]


async def test_decode_yields_its_events(cluster: Cluster) -> None:
    assert [event async for event in cluster.decode.decode(nouns.decode_job())] == DECODE_EVENTS


async def test_unary_calls(cluster: Cluster) -> None:
    await cluster.prefill.assign("t-1", 0, "10.0.0.1:7")
    assert cluster.fake.assigned == [("t-1", 0, "10.0.0.1:7")]
    assert await cluster.prefill.describe() == nouns.node_info("p-1")
    assert await cluster.decode.describe() == nouns.node_info()
    assert await cluster.registry.register(nouns.node_info()) == Lease(3.5)
    with pytest.raises(HandshakeRefused, match="node_id: 'd-1' here"):
        await cluster.registry.register(nouns.node_info("else"))


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("no room", retry_after_s=7.25),
        RequestError("too long", param="prompt"),
        RequestError("nothing named"),
        NonFiniteError("NaN at token 7", span=7),
        CheckpointError("model.safetensors: missing"),
        Unavailable("no decode node"),
        DeadlineExceeded("queued too long"),
        TransferError("x" * 10_000),
        HackkvError("the base class — with “quotes”"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_keep_their_class_message_and_fields(cluster: Cluster, error: HackkvError) -> None:
    cluster.fake.error = error
    cluster.fake.events = PREFILL_EVENTS[:1]
    seen = []
    with pytest.raises(HackkvError) as caught:  # noqa: PT012 - the loop is the call
        async for event in cluster.prefill.prefill(nouns.prefill_job()):
            seen.append(event)
    assert seen == PREFILL_EVENTS[:1]
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    with pytest.raises(type(error)):
        await cluster.prefill.assign("t-1", 0, "a:1")


async def test_closing_the_iterator_closes_the_generator_at_the_node(cluster: Cluster) -> None:
    cluster.fake.hang = True
    events = cluster.prefill.prefill(nouns.prefill_job())
    assert await anext(events) == PREFILL_EVENTS[0]
    await events.aclose()  # type: ignore[attr-defined]
    await cluster.fake.closed.wait()


async def test_cancelling_the_reader_closes_the_generator_at_the_node(cluster: Cluster) -> None:
    cluster.fake.hang = True
    started = asyncio.Event()

    async def read() -> None:
        async for _ in cluster.prefill.prefill(nouns.prefill_job()):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await cluster.fake.closed.wait()


async def test_an_unexpected_exception_is_internal_and_the_server_lives(
    remote: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    remote.fake.error = KeyError("secret detail")
    with pytest.raises(HackkvError, match="KeyError") as caught:
        await remote.prefill.assign("t-1", 0, "a:1")
    assert caught.value.code == "internal"
    assert "secret detail" not in str(caught.value)
    assert "Traceback" in caplog.text
    assert await remote.prefill.describe() == nouns.node_info("p-1")


async def test_a_malformed_job_never_leaves_the_caller(remote: Cluster) -> None:
    with pytest.raises(RequestError):
        await remote.prefill.assign("t-1", 0, "\ud800")
    assert remote.fake.assigned == []


async def test_a_node_that_does_not_answer_is_a_deadline(remote: Cluster) -> None:
    remote.fake.hang = True
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1"):
        await remote.prefill.describe()


async def test_a_role_that_is_not_served_is_unavailable(server: RpcServer, channels: ChannelPool) -> None:
    address = await server.start()
    with pytest.raises(Unavailable, match=address):
        await DecodeClient(address, channels).describe()


async def test_closing_the_server_ends_streams_with_node_lost(server: RpcServer, remote: Cluster) -> None:
    remote.fake.hang = True
    events = remote.prefill.prefill(nouns.prefill_job())
    for event in PREFILL_EVENTS:
        assert await anext(events) == event
    waiting = asyncio.ensure_future(anext(events))
    await server.close()
    assert remote.fake.closed.is_set()
    with pytest.raises(NodeLost, match=r"127\.0\.0\.1"):
        await waiting


async def test_closing_the_pool_ends_calls_with_node_lost(channels: ChannelPool, remote: Cluster) -> None:
    remote.fake.hang = True
    events = remote.prefill.prefill(nouns.prefill_job())
    for event in PREFILL_EVENTS:
        assert await anext(events) == event
    waiting = asyncio.ensure_future(anext(events))
    await channels.close()
    with pytest.raises(NodeLost):
        await waiting
    await remote.fake.closed.wait()
    with pytest.raises(NodeLost):
        await remote.prefill.describe()


async def test_a_restarted_peer_is_reached_at_the_next_call(channels: ChannelPool) -> None:
    first = RpcServer("127.0.0.1", 0)
    first.add_decode(FakeDecode())
    address = await first.start()
    client = DecodeClient(address, channels)
    assert await client.describe() == nouns.node_info()
    await first.close()
    for _ in range(3):
        with pytest.raises(NodeLost, match=address):
            await client.describe()
    second = RpcServer("127.0.0.1", int(address.rpartition(":")[2]))
    second.add_decode(FakeDecode())
    assert await second.start() == address
    assert await client.describe() == nouns.node_info()
    await second.close()


async def test_a_taken_port_is_a_config_error_that_names_it(server: RpcServer) -> None:
    address = await server.start()
    assert await server.start() == address
    with pytest.raises(ConfigError, match=address):
        await RpcServer("127.0.0.1", int(address.rpartition(":")[2])).start()


def test_a_wildcard_needs_an_advertised_host() -> None:
    with pytest.raises(ConfigError, match="wildcard"):
        RpcServer("0.0.0.0", 0)


async def test_the_advertised_host_is_what_peers_dial(channels: ChannelPool) -> None:
    server = RpcServer("0.0.0.0", 0, advertise_host="localhost")
    server.add_decode(FakeDecode())
    address = await server.start()
    assert address.startswith("localhost:")
    assert await DecodeClient(address, channels).describe() == nouns.node_info()
    await server.close()


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
    keepalive = Keepalive(time_s=0.1, timeout_s=0.2)
    server, channels, fake = RpcServer("127.0.0.1", 0, keepalive=keepalive), ChannelPool(keepalive), FakePrefill()
    fake.hang = True
    server.add_prefill(fake)
    relay = Relay(int((await server.start()).rpartition(":")[2]))
    address = await relay.start()
    events = PrefillClient(address, channels).prefill(nouns.prefill_job())
    for event in PREFILL_EVENTS:
        assert await anext(events) == event
    relay.go_silent()
    with pytest.raises(NodeLost, match=address):
        await asyncio.wait_for(anext(events), 5)
    await asyncio.wait_for(fake.closed.wait(), 5)
    await channels.close()
    await server.close()
    await relay.close()


async def test_generated_stubs_can_call_the_server(server: RpcServer, remote: Cluster) -> None:
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.DecodeStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.Describe(kv_pb2.Empty())
        assert info.node_id == "d-1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Run(kv_pb2.DecodeJob()).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request: missing in DecodeJob" in (caught.value.details() or "")
