"""Malformed KV frames: a receiver must refuse each with a named error, unless it equals what was sent.

Most frames go through the wire's decoder and the `FrameLedger` in this process. The others go over gRPC into the `Push`
method of a live decode node, which expects the transfer and has reserved pages for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from hack_kernels.base import Plane

from bench.cluster import until
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import FrameRefused, HackkvError
from hackkv.expected import Expected, open_planes
from hackkv.framing import FrameWriter
from hackkv.ledger import FrameLedger
from hackkv.model.worker import Worker, load_worker
from hackkv.types import DecodeJob, Fingerprint, Handoff, HandoffEnd, KvFrame, PlaneSpan, Receipt, Request, Sampling
from transport import methods
from transport.channels import ChannelPool
from transport.closing import closing
from transport.convert_kv import PUSH_REPLY, PUSH_REQUEST, PushRequest, encode_push_request
from transport.rpc_client import DecodeClient
from transport.status import translating

TRANSFER = "fuzz"
UINT32, UINT64 = (1 << 32) - 1, (1 << 64) - 1
NUMBERS = (0, 1, 2, 3, 63, 64, 65, 127, 128, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, UINT32)
LARGE = (*NUMBERS, 1 << 33, 1 << 62, (1 << 63) - 1, UINT64)
TEXTS = ("", "x", TRANSFER + "2", "é" * 50, "t" * 4096, "t" * 4097, "\x00", "../../etc/passwd")
CALL_S = 20.0


class Conversation:
    """A valid handoff of random pages, from which spoiled ones are made."""

    def __init__(self, worker: Worker, num_tokens: int, transfer_id: str = TRANSFER) -> None:
        self.worker, self.num_tokens = worker, num_tokens
        self.sealed = worker.footprint.sealed(num_tokens)
        writer = FrameWriter(transfer_id, 0, worker.codec.wire_form)
        frames: list[KvFrame] = []
        heads, layers = worker.layout.num_kv_heads, range(worker.layout.num_layers)
        if sent := worker.footprint.sent_pages(num_tokens):
            sealed = [_pages(worker.codec.wire_planes[layer], heads, len(sent)) for layer in layers]
            frames += writer.frames(0, sent.start, sealed)  # all layers in one frame, exact rows layer by layer
        if rows := worker.footprint.exact_rows(num_tokens):
            for layer in layers:
                frames += writer.frames(
                    layer, self.sealed, [_open_page(heads, worker.footprint.widths[layer], rows)], rows
                )
        handoff = Handoff(transfer_id, 0, worker.fingerprint, num_tokens)
        self.nouns: list[PushRequest] = [handoff, *frames, writer.end(first_token=5)]
        self.encoded = [encode_push_request(noun) for noun in self.nouns]

    def ledger(self) -> FrameLedger:
        """A receiver's ledger before the first frame."""
        worker = self.worker
        codec = worker.codec
        return FrameLedger(
            TRANSFER, 0, Expected(worker.layout, codec.wire_planes, self.num_tokens, worker.footprint, codec.wire_form)
        )


def _pages(wire_planes: Iterable[Plane], heads: int, pages: int) -> dict[str, torch.Tensor]:
    shapes = {plane.name: ((heads, pages, *plane.shape), plane.dtype) for plane in wire_planes}
    return {name: torch.zeros(shape, dtype=dtype) + 1 for name, (shape, dtype) in shapes.items()}


def _open_page(heads: int, width: int, rows: int) -> dict[str, torch.Tensor]:
    planes = open_planes(width, rows)
    return {plane.name: torch.ones(heads, 1, *plane.shape, dtype=plane.dtype) for plane in planes}


def tiny_worker(folder: Path, codec: str) -> Worker:
    """A worker like those of the nodes of `tiny_cluster`."""
    return load_worker(ModelConfig(path=str(folder), dtype="float32", threads=1), CodecConfig(name=codec))


# Spoiling ----------------------------------------------------------------------------------------------------------


def spoil(rng: random.Random, conversation: Conversation) -> list[bytes]:
    """The messages of a handoff with one or several flaws."""
    messages = list(conversation.encoded)
    match rng.randrange(8):
        case 0 | 1 | 2:
            at = rng.randrange(len(messages))
            messages[at] = _encoded(rng, _spoiled_noun(rng, conversation.nouns[at]), messages[at])
        case 3 | 4:
            at = rng.randrange(len(messages))
            messages[at] = _spoiled_bytes(rng, messages[at])
        case 5:
            rng.shuffle(messages)
        case 6:
            at = rng.randrange(len(messages))
            messages[at:at] = rng.choices(messages, k=rng.randint(1, 3))
        case _:
            del messages[rng.randrange(len(messages))]
    return messages


def _encoded(rng: random.Random, noun: PushRequest, original: bytes) -> bytes:
    try:
        return encode_push_request(noun)
    except HackkvError:  # our own encoder refuses a value that no field can hold, so the bytes are spoiled instead
        return _spoiled_bytes(rng, original)


def _spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    match rng.randrange(5):
        case 0:
            for _ in range(rng.randint(1, 8)):
                spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        case 1:
            del spoiled[rng.randrange(len(spoiled)) :]
        case 2:
            spoiled += spoiled[rng.randrange(len(spoiled)) :]
        case 3:
            at = rng.randrange(min(len(spoiled), 200))
            spoiled[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        case _:
            spoiled = bytearray(rng.randbytes(rng.randrange(300)))
    return bytes(spoiled)


def _spoiled_noun(rng: random.Random, noun: PushRequest) -> PushRequest:
    if isinstance(noun, Handoff):
        return replace(noun, **rng.choice(_HANDOFF)(rng, noun))
    if isinstance(noun, HandoffEnd):
        return replace(noun, **rng.choice(_END)(rng, noun))
    return replace(noun, **rng.choice(_FRAME)(rng, noun))


Change = Callable[[random.Random, Any], dict[str, Any]]


def _number(field: str, values: tuple[int, ...] = NUMBERS) -> Change:
    def change(rng: random.Random, noun: Any) -> dict[str, Any]:
        old: int = getattr(noun, field)
        return {field: rng.choice((*values, old + 1, max(0, old - 1), rng.randrange(values[-1])))}

    return change


def _text(field: str) -> Change:
    return lambda rng, _: {field: rng.choice(TEXTS)}


def _fingerprint(rng: random.Random, noun: Handoff) -> dict[str, Any]:
    fields = list(noun.fingerprint.fields)
    at = rng.randrange(len(fields))
    fields[at : at + 1] = rng.choice(([], [(fields[at][0], "?")], [fields[at]] * 300, [("surplus", "1"), fields[at]]))
    return {"fingerprint": Fingerprint(tuple(fields))}


def _payload(rng: random.Random, noun: KvFrame) -> dict[str, Any]:
    payload = bytearray(bytes(noun.payload))
    match rng.randrange(4):
        case 0:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        case 1:
            del payload[rng.randrange(len(payload)) :]
        case 2:
            payload += rng.randbytes(rng.randint(1, 64))
        case _:
            payload = bytearray(rng.randbytes(len(payload)))
    return {"payload": bytes(payload)}


def _planes(rng: random.Random, noun: KvFrame) -> dict[str, Any]:
    planes = list(noun.planes)
    at = rng.randrange(len(planes))
    span = planes[at]
    match rng.randrange(7):
        case 0:
            planes[at] = replace(span, name=rng.choice(TEXTS))
        case 1:
            planes[at] = replace(span, raw_bytes=rng.choice(LARGE))
        case 2:
            planes[at] = replace(span, coded_bytes=rng.choice(LARGE))
        case 3:
            planes[at] = replace(span, checksum=rng.choice((0, span.checksum ^ 1, UINT64)))
        case 4:
            planes[at : at + 1] = rng.choice(([], [span, span], [PlaneSpan("x", 1, 1, 1)] * 100))
        case 5:
            planes[at] = replace(span, method=rng.choice((1 - min(span.method, 1), 2, 255, UINT32)))
        case _:
            planes.reverse()
    return {"planes": tuple(planes)}


_HANDOFF: tuple[Change, ...] = (_text("transfer_id"), _number("epoch"), _fingerprint, _number("num_tokens"))
_END: tuple[Change, ...] = (
    *map(_number, ("epoch", "num_frames", "first_token")),
    _number("checksum", LARGE),
    _text("transfer_id"),
)
_FRAME: tuple[Change, ...] = (
    *map(_number, ("epoch", "seq", "layer", "layer_count", "head_start", "head_count", "page_start")),
    *map(_number, ("page_count", "rows")),
    _text("transfer_id"),
    _payload,
    _planes,
)


# Receiving ---------------------------------------------------------------------------------------------------------


def name_of(error: HackkvError) -> str:
    """The error's code, with the reason of a refused frame."""
    return f"{error.code}: {error.reason}" if isinstance(error, FrameRefused) else error.code


def receive(conversation: Conversation, messages: list[bytes]) -> str:
    """Decode and check messages as a decode node's inbox does; return how it ended. Other errors are not caught.

    Raises `AssertionError` if a frame or an end was accepted that was not sent.
    """
    ledger, opened = conversation.ledger(), False
    handoff = conversation.nouns[0]
    try:
        for data in messages:
            noun = PUSH_REQUEST.decode(data)
            if not opened:
                if noun != handoff:
                    return "handshake_refused"
                opened = True
            elif isinstance(noun, KvFrame):
                ledger.accept(noun)
                if noun not in conversation.nouns:
                    raise AssertionError(f"believed {noun}")
            elif isinstance(noun, HandoffEnd):
                ledger.finish(noun)
                if noun != conversation.nouns[-1]:
                    raise AssertionError(f"believed {noun}")
                return "harmless"
            else:
                return "frame_refused: out_of_order"
    except HackkvError as error:
        return name_of(error)
    return "the stream ended early"


class LiveDecodeNode:
    """A decode node process that a peer, which the cluster trusts, attacks through the node's port."""

    def __init__(self, address: str, worker: Worker, channels: ChannelPool) -> None:
        self._address, self._worker = address, worker
        self._channels = channels
        self._decode = DecodeClient(address, self._channels)

    async def attack(self, rng: random.Random) -> str:
        """Reserve room, push one spoiled handoff, and return how it ended. Raises `TimeoutError` if it never ends."""
        transfer_id = f"fuzz-{rng.getrandbits(64):x}"
        tokens = rng.choice((1, 40, 64, 100))
        conversation = Conversation(self._worker, tokens, transfer_id)
        request = Request(transfer_id, tuple(range(3, 3 + tokens)), Sampling(seed=0, max_tokens=4, temperature=0.0))
        async with asyncio.timeout(CALL_S):
            async with closing(self._decode.decode(DecodeJob(request, transfer_id, 0))) as events:
                await anext(events)  # Reserved
                return await self._push(spoil(rng, conversation))

    async def free_pages(self) -> int:
        """The number of free pages that the node reports."""
        return (await self._decode.describe()).free_pages

    async def _push(self, messages: list[bytes]) -> str:
        channel = await self._channels.get(self._address)
        call = channel.stream_stream(methods.KV_PUSH, None, None)(_each(messages), metadata=self._channels.metadata)
        try:
            while True:
                with translating(self._address):
                    data = await call.read()
                if not isinstance(data, bytes):
                    return "no verdict"
                reply = PUSH_REPLY.decode(data)
                if isinstance(reply, HackkvError):
                    return name_of(reply)
                if isinstance(reply, Receipt):
                    return "harmless"
        except HackkvError as error:
            return name_of(error)
        finally:
            call.cancel()


async def _each(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def attack_live(
    node: LiveDecodeNode, count: int, concurrency: int, seed: int, done: Callable[[int], None]
) -> Counter[str]:
    """Push `count` spoiled handoffs into a live decode node. Raises `TimeoutError` if a page does not come back."""
    endings: Counter[str] = Counter()
    rngs = [random.Random(seed + place) for place in range(concurrency)]
    before = await node.free_pages()

    async def work(rng: random.Random, share: int) -> None:
        for _ in range(share):
            endings[await node.attack(rng)] += 1
            done(1)

    with contextlib.suppress(grpc.aio.UsageError):
        async with asyncio.TaskGroup() as tasks:
            for place, rng in enumerate(rngs):
                tasks.create_task(work(rng, count // concurrency + (place < count % concurrency)))

    async def returned() -> bool:
        return await node.free_pages() == before

    await until(returned, CALL_S, "every reserved page is free again")
    return endings


def attack_in_process(worker: Worker, count: int, seed: int, done: Callable[[int], None]) -> Counter[str]:
    """Send `count` spoiled handoffs through decoder and ledger in this process."""
    rng = random.Random(seed)
    conversations = [Conversation(worker, tokens) for tokens in (1, 40, 64, 100, 192)]
    endings: Counter[str] = Counter()
    for nth in range(count):
        conversation = rng.choice(conversations)
        endings[receive(conversation, spoil(rng, conversation))] += 1
        if nth % 100 == 99:
            done(100)
    return endings
