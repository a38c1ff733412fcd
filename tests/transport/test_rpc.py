"""The node protocols, called directly and over gRPC: a caller must not see a difference."""

from __future__ import annotations

import asyncio

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
from hackkv.held import HeldKv
from hackkv.nodes import Lease
from tests.transport import nouns
from tests.transport.fakes import DECODE_EVENTS, PREFILL_EVENTS, Cluster, FakeDecode
from transport.channels import ChannelPool
from transport.pb import kv_pb2, kv_pb2_grpc
from transport.rpc_client import DecodeClient
from transport.rpc_server import RpcServer


async def test_prefill_yields_its_events(cluster: Cluster) -> None:
    assert [event async for event in cluster.prefill.prefill(nouns.prefill_job())] == PREFILL_EVENTS
    assert cluster.fake.jobs == [nouns.prefill_job()]


async def test_decode_yields_its_events(cluster: Cluster) -> None:
    assert [event async for event in cluster.decode.decode(nouns.decode_job())] == DECODE_EVENTS


async def test_unary_calls(cluster: Cluster) -> None:
    await cluster.prefill.assign("t-1", 0, "10.0.0.1:7", HeldKv(2, 1))
    assert cluster.fake.assigned == [("t-1", 0, "10.0.0.1:7", HeldKv(2, 1))]
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


async def test_generated_stubs_can_call_the_server(server: RpcServer, remote: Cluster) -> None:
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.DecodeStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.Describe(kv_pb2.Empty())
        assert info.node_id == "d-1"
        calls = stub.Serve()
        await calls.write(kv_pb2.Asks(asks=[kv_pb2.Ask(call=7, job=kv_pb2.DecodeJob().SerializeToString())]))
        (answer,) = (await calls.read()).answers
        assert answer.call == 7
        assert answer.failure.code == RequestError.code
        assert "request: missing in DecodeJob" in answer.failure.message
        calls.cancel()
