"""Hostile bytes on a raw gRPC port: each call ends with an error status, and the server goes on.

HACKKV_FUZZ_CALLS=100000 makes it a bench."""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from hackkv.errors import FrameRefused, HackkvError
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from tests.transport import nouns
from tests.transport.fakes import FakeDecode, FakePrefill, FakeRegistry
from tests.wires import LINKS_HERE
from transport import methods
from transport.channels import ChannelPool
from transport.coder import MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES
from transport.convert import ASSIGNMENT, DECODE_JOB, EMPTY, NODE_INFO, PREFILL_JOB, Assignment, Empty
from transport.convert_calls import ANSWERS, ASKS, Ask
from transport.convert_kv import HANDOFF, PUSH_REPLY, PUSH_REQUEST, Accepted, Announced
from transport.convert_pair import PAIR_MESSAGE, Hello, Paired, PairKey, PairMessage, Ready
from transport.grpc_wire import GrpcListener
from transport.link import link_kind
from transport.rpc_client import DecodeClient
from transport.rpc_server import PLAIN, WIRE_KEY, RpcServer
from transport.status import rebuild, write_message
from transport.wires import WIRES, Site

HELLOS: list[PairMessage] = [Hello(link_kind(name).dialect) for name in LINKS_HERE]
SEEDS: dict[str, list[bytes]] = {
    methods.PREFILL_SERVE: [ASKS.encode([Ask(1, PREFILL_JOB.encode(nouns.prefill_job()))]), ASKS.encode([Ask(1)])],
    methods.PREFILL_ASSIGN: [ASSIGNMENT.encode(Assignment("t-1", 0, "a:1"))],
    methods.PREFILL_DESCRIBE: [EMPTY.encode(Empty())],
    methods.DECODE_SERVE: [ASKS.encode([Ask(1, DECODE_JOB.encode(nouns.decode_job())), Ask(1, b"\xff"), Ask(2)])],
    methods.DECODE_DESCRIBE: [EMPTY.encode(Empty())],
    methods.REGISTRY_REGISTER: [NODE_INFO.encode(nouns.node_info())],
    methods.KV_PUSH: [
        PUSH_REQUEST.encode(item)
        for item in (nouns.handoff(), nouns.frame(0), Announced(nouns.frame(1, b""), 1, 1, 5), nouns.end(2))
    ],
    methods.KV_FETCH: [HANDOFF.encode(nouns.handoff())],
    methods.KV_CONNECT: [
        PAIR_MESSAGE.encode(item) for item in (*HELLOS, PairKey("0/0", b"there"), Ready(1, 5), Paired(1))
    ],
}
SERVE = (methods.PREFILL_SERVE, methods.DECODE_SERVE)
LAST = 1 << 63
"""The number of the valid call that follows others, which may be invalid."""
LAST_CALL = {
    methods.PREFILL_SERVE: ASKS.encode([Ask(LAST, PREFILL_JOB.encode(nouns.prefill_job()))]),
    methods.DECODE_SERVE: ASKS.encode([Ask(LAST, DECODE_JOB.encode(nouns.decode_job()))]),
}


def mutate(rng: random.Random, seed: bytes) -> bytes:
    """Flip, cut, repeat or replace bytes of `seed`."""
    data = bytearray(seed)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randrange(1, 5)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data) + 1) :]
        case 2:
            data += data[rng.randrange(len(data) + 1) :]
        case _:
            data = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data)


async def attack(channel: grpc.aio.Channel, rng: random.Random, wire: str) -> HackkvError | None:
    """Make one hostile call; return the error it ended with, None if the bytes happened to be valid."""
    method = rng.choice(methods.ALL)
    messages = [mutate(rng, seed) if rng.random() < 0.7 else seed for seed in SEEDS[method]]
    if method in SERVE:
        messages.append(LAST_CALL[method])
    if method in (methods.KV_PUSH, methods.KV_CONNECT):
        if rng.random() < 0.3:
            rng.shuffle(messages)
        messages = messages[: rng.randrange(1, 4)]
    return await call_raw(channel, method, messages, wire)


async def call_raw(
    channel: grpc.aio.Channel, method: str, messages: list[bytes], wire: str = PLAIN
) -> HackkvError | None:
    """Send messages as they are; return the error that the call ended with."""
    # On the wire every method takes a stream of requests. A unary method reads the first.
    call = channel.stream_stream(method, None, None)(None, metadata=((WIRE_KEY, wire),))
    failures = list[HackkvError]()
    try:
        for message in messages:
            if not await write_message(call, message):
                break
        if method not in SERVE:  # a stream of calls stays open
            await call.done_writing()
        while isinstance(data := await call.read(), bytes):
            if method in SERVE:
                answers = ANSWERS.decode(data)
                failures += [answer.body for answer in answers if isinstance(answer.body, HackkvError)]
                if any(answer.call == LAST and answer.body is None for answer in answers):
                    return failures[0] if failures else None
            if method == methods.KV_PUSH and not isinstance(reply := PUSH_REPLY.decode(data), Accepted):
                return reply if isinstance(reply, HackkvError) else None
            if method == methods.KV_CONNECT and isinstance(said := PAIR_MESSAGE.decode(data), HackkvError):
                return said
    except grpc.aio.AioRpcError as exc:
        return rebuild(exc, "peer")
    finally:
        call.cancel()
    return None


async def count_items(handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
    """A `deliver` that keeps nothing."""
    return nouns.receipt(handoff.transfer_id, tokens=len([None async for _ in frames]))


async def fuzz(wire: str, calls: int, seed: int) -> dict[str, int]:
    """Attack a fresh server `calls` times; return how the calls ended, by error code."""
    server, channels = RpcServer("127.0.0.1", 0), ChannelPool()
    site = Site(server, frame_timeout_s=1.0)
    sender, listener = WIRES[wire].sender(site), WIRES[wire].listener(site)
    server.add_prefill(FakePrefill())
    server.add_decode(FakeDecode())
    server.add_registry(FakeRegistry())
    address = await listener.serve(count_items, lambda handoff: nouns.frames(3, transfer_id=handoff.transfer_id))
    rng, endings = random.Random(seed), dict[str, int]()
    channel = await channels.get(address)
    for _ in range(calls):
        error = await asyncio.wait_for(attack(channel, rng, wire), 60)
        code = "ok" if error is None else error.code
        endings[code] = endings.get(code, 0) + 1
    assert await DecodeClient(address, channels).describe() == nouns.node_info()
    assert (await sender.push(address, nouns.handoff(), nouns.frames(3))).tokens == 4
    await channels.close()
    await sender.close()
    await listener.close()
    await server.close()
    return endings


@pytest.mark.parametrize("wire", [PLAIN, *LINKS_HERE])
async def test_hostile_bytes_end_in_named_errors_and_leave_the_server_alive(wire: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    endings = await fuzz(wire, int(os.environ.get("HACKKV_FUZZ_CALLS", "400")), seed=7)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert "internal" not in endings
    # The listener reports a stream that was cut short as `node_lost`. The server itself stays up throughout.
    assert {"request", "transfer", "frame_refused", "handshake_refused", "node_lost"} <= endings.keys()
    assert grown < 64 << 10, f"{grown} KiB"


async def test_oversized_messages_are_refused_by_name() -> None:
    server = RpcServer("127.0.0.1", 0)
    listener = GrpcListener(server)
    address = await listener.serve(count_items)
    for size, words in ((MAX_PAYLOAD_BYTES + 1, str(MAX_PAYLOAD_BYTES)), (MAX_REQUEST_BYTES, "larger than max")):
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            messages = [PUSH_REQUEST.encode(item) for item in (nouns.handoff(), nouns.frame(0, bytes(size)))]
            error = await call_raw(channel, methods.KV_PUSH, messages)
            assert isinstance(error, FrameRefused)
            assert words in str(error)
    await listener.close()
    await server.close()
