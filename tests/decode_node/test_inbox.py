"""Handoffs land whole or not at all, over every wire of `WIRES` and for every codec of `CODECS`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_node.inbox import Inbox, Reservation
from hackkv.codecs import CODECS
from hackkv.errors import FrameRefused, HackkvError, HandshakeRefused, TransferError
from hackkv.framing import FrameWriter, handoff_end
from hackkv.model.runner import ModelRunner
from hackkv.model.worker import WIRE_VERSION, Worker
from hackkv.pages import Grant
from hackkv.types import DecodeJob, Fingerprint, Handoff, HandoffEnd, KvFrame
from tests.pair import PI, TIMEOUT_S, greedy, prompt, tiny_worker
from transport.base import KvSender
from transport.wires import WIRES, Wire

Frames = AsyncIterator[KvFrame | HandoffEnd]
TOKENS = 2 * PI + 5
GRANT = Grant((5, 2, 7), 1)
REQUEST = greedy("r", prompt(1, TOKENS), 4)


@pytest.fixture(params=sorted(WIRES))
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    made = WIRES[request.param](TIMEOUT_S)
    yield made
    await made.close()


class Decode:
    """A decode node's inbox behind a wire, and a sender that reaches it."""

    def __init__(self, wire: Wire, codec: str = "hack") -> None:
        self.worker: Worker = tiny_worker(codec)
        self.runner = ModelRunner(self.worker.model, self.worker.codec, 9, 3)
        self.inbox = Inbox(self.runner, self.worker.fingerprint)
        self.listener = wire.listener()
        self.sender: KvSender = wire.sender()
        self.address = ""

    async def __aenter__(self) -> Decode:
        self.address = await self.listener.serve(self.inbox.deliver)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.sender.close()
        await self.listener.close()

    @property
    def handoff(self) -> Handoff:
        return Handoff("t", 2, self.worker.fingerprint, TOKENS)

    def reserve(self) -> Reservation:
        return self.inbox.reserve(DecodeJob(REQUEST, "t", 2), GRANT)

    def bytes(self) -> list[Tensor]:
        """A copy of everything that the pools hold."""
        pools = [(*pool.planes.values(), pool.open_k, pool.open_v) for pool in self.runner.pools]
        return [plane.clone().view(torch.uint8) for pool in pools for plane in pool]


def planned(worker: Worker, transfer_id: str = "t", epoch: int = 2, seed: int = 3) -> list[KvFrame | HandoffEnd]:
    """An honest handoff of random bytes: two sealed pages and five open rows of each layer, and token 9."""
    generator = torch.Generator().manual_seed(seed)
    writer, items = FrameWriter(transfer_id, epoch), list[KvFrame | HandoffEnd]()
    for layer in range(2):
        planes = {}
        for plane in worker.codec.format.wire_planes:
            raw = torch.randint(0, 256, (2 * 2 * plane.page_bytes,), dtype=torch.uint8, generator=generator)
            planes[plane.name] = raw.view(plane.dtype).view(2, 2, *plane.shape)
        items += writer.frames(layer, 0, {name: plane[:, :1] for name, plane in planes.items()})
        items += writer.frames(layer, 1, {name: plane[:, 1:] for name, plane in planes.items()})
        rows = {name: torch.full((2, 1, 5, 64), layer + 0.5, dtype=torch.float16) for name in ("open_k", "open_v")}
        items += writer.frames(layer, 2, rows, 5)
    return [*items, writer.end(9)]


async def send(items: list[KvFrame | HandoffEnd]) -> Frames:
    for item in items:
        yield item


class Untouched:
    """A sender's frames that nobody should ask for."""

    def __init__(self) -> None:
        self.touched = False

    async def frames(self) -> Frames:
        self.touched = True
        yield handoff_end("t", 2, 0, 9)


@pytest.mark.parametrize("codec", sorted(CODECS))
async def test_a_handoff_lands_bit_exact_and_is_counted_by_plane(wire: Wire, codec: str) -> None:
    """In the granted pages and slot and nowhere else; the receipt's bytes are the planned ones, plane by plane."""
    async with Decode(wire, codec) as node:
        before, reservation, items = node.bytes(), node.reserve(), planned(node.worker)
        receipt = await node.sender.push(node.address, node.handoff, send(items))
        arrival = await reservation.arrival
        assert (arrival.first_token, arrival.receipt) == (9, receipt)
        due = {plane.name: 2 * 2 * 2 * plane.page_bytes for plane in node.worker.codec.format.wire_planes}
        due |= dict.fromkeys(("open_k", "open_v"), 2 * 2 * 5 * 64 * 2)
        assert dict(receipt.bytes_by_plane) == due
        assert (receipt.transfer_id, receipt.tokens, receipt.fp16_bytes) == ("t", TOKENS, 2 * 2 * 2 * 2 * 64 * TOKENS)
        assert receipt.receive_s > 0
        assert receipt.header_bytes < 64 * 5 * len(items)
        assert node.inbox.received_tokens == TOKENS
        frames = [item for item in items if isinstance(item, KvFrame) and not item.rows]
        for layer, pool in enumerate(node.runner.pools):
            wire_form = node.worker.codec.to_wire(pool, torch.tensor(GRANT.pages[:2]))
            for page in range(2):
                (frame,) = (frame for frame in frames if (frame.layer, frame.page_start) == (layer, page))
                landed = b"".join(
                    p[:, page].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in wire_form.values()
                )
                assert landed == frame.payload
            assert bool((pool.open_k[1, :, :5] == layer + 0.5).all())
            assert bool((pool.open_v[1, :, :5] == layer + 0.5).all())
        names = len(node.bytes()) // 2
        for index, (old, new) in enumerate(zip(before, node.bytes(), strict=True)):
            held = [1] if index % names >= names - 2 else list(GRANT.pages[:2])
            others = [i for i in range(old.shape[0]) if i not in held]
            assert torch.equal(old[others], new[others]), "written outside of the grant"
        node.inbox.close(reservation)


def other_fingerprint(handoff: Handoff) -> Handoff:
    fields = dict(handoff.fingerprint.fields) | {"codec.seed": "7"}
    return replace(handoff, fingerprint=Fingerprint(tuple(fields.items())))


def less_fingerprint(handoff: Handoff) -> Handoff:
    return replace(handoff, fingerprint=Fingerprint(handoff.fingerprint.fields[1:]))


@pytest.mark.parametrize(
    ("change", "words", "reason", "fails_reservation"),
    [
        (other_fingerprint, "fingerprints differ in codec.seed: '0' here, '7' at the peer", "fingerprint", True),
        (less_fingerprint, f"fingerprints differ in wire_version: '{WIRE_VERSION}' here", "fingerprint", True),
        (lambda h: replace(h, num_tokens=TOKENS + 1), f"num_tokens {TOKENS + 1}, expected {TOKENS}", "length", True),
        (lambda h: replace(h, epoch=1), "epoch 1, expected 2", "stale", False),
        (lambda h: replace(h, transfer_id="u"), "transfer_id 'u' is not expected here", "unknown", False),
    ],
    ids=["fingerprint", "missing field", "num_tokens", "stale", "unknown"],
)
async def test_a_handshake_is_refused_by_name_before_any_frame(
    wire: Wire, change: Callable[[Handoff], Handoff], words: str, reason: str, fails_reservation: bool
) -> None:
    """A stranger does not harm the transfer that is expected; the expected one with wrong settings ends it."""
    async with Decode(wire) as node:
        reservation, source, before = node.reserve(), Untouched(), node.bytes()
        with pytest.raises(HandshakeRefused, match=words):
            await node.sender.push(node.address, change(node.handoff), source.frames())
        assert not source.touched
        assert node.inbox.refused == {reason: 1}
        assert all(torch.equal(x, y) for x, y in zip(before, node.bytes(), strict=True))
        if fails_reservation:
            with pytest.raises(HandshakeRefused, match=words):
                await reservation.arrival
            with pytest.raises(HandshakeRefused, match="received already"):
                await node.sender.push(node.address, node.handoff, source.frames())
        else:
            receipt = await node.sender.push(node.address, node.handoff, send(planned(node.worker)))
            assert (await reservation.arrival).receipt == receipt
        node.inbox.close(reservation)


async def test_a_second_push_of_a_transfer_is_refused_and_the_first_lands(wire: Wire) -> None:
    """During the first and after it."""
    async with Decode(wire) as node:
        reservation, items, source = node.reserve(), planned(node.worker), Untouched()
        half, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> Frames:
            for index, item in enumerate(items):
                if index == 3:
                    half.set()
                    await go_on.wait()
                yield item

        first = asyncio.create_task(node.sender.push(node.address, node.handoff, slow()))
        await half.wait()
        with pytest.raises(HandshakeRefused, match="being received already"):
            await node.sender.push(node.address, node.handoff, source.frames())
        assert not reservation.arrival.done()
        go_on.set()
        receipt = await first
        with pytest.raises(HandshakeRefused, match="received already"):
            await node.sender.push(node.address, node.handoff, source.frames())
        assert (await reservation.arrival).receipt == receipt
        assert not source.touched
        node.inbox.close(reservation)
        with pytest.raises(HandshakeRefused, match="not expected here"):
            await node.sender.push(node.address, node.handoff, source.frames())


def frame_at(items: list[KvFrame | HandoffEnd], index: int) -> KvFrame:
    item = items[index]
    assert isinstance(item, KvFrame)
    return item


def corrupt(items: list[KvFrame | HandoffEnd]) -> None:
    frame = frame_at(items, 3)
    items[3] = replace(frame, payload=bytes([frame.payload[0] ^ 4]) + frame.payload[1:])


def truncate(items: list[KvFrame | HandoffEnd]) -> None:
    items[3] = replace(frame_at(items, 3), payload=frame_at(items, 3).payload[:-1])


def reorder(items: list[KvFrame | HandoffEnd]) -> None:
    items[3], items[4] = items[4], items[3]


def duplicate(items: list[KvFrame | HandoffEnd]) -> None:
    items.insert(3, items[2])


def stale(items: list[KvFrame | HandoffEnd]) -> None:
    items[3] = replace(frame_at(items, 3), epoch=1)


def oversize(items: list[KvFrame | HandoffEnd]) -> None:
    frame = frame_at(items, 3)
    items[3] = replace(frame, payload=frame.payload + b"\0" * 100)


def end_early(items: list[KvFrame | HandoffEnd]) -> None:
    items[3:] = [handoff_end("t", 2, 3, 9)]


def invent_a_token(items: list[KvFrame | HandoffEnd]) -> None:
    items[-1] = handoff_end("t", 2, 6, 512)


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (corrupt, "corrupt", "checksum of plane k_codes, layer 1, frame 3"),
        (truncate, "truncated", "payload has"),
        (reorder, "order", "frame 4 arrived where 3 was due"),
        (duplicate, "duplicate", "frame 2 arrived where 3 was due"),
        (stale, "stale", "epoch 1 in epoch 2"),
        (oversize, "oversized", "payload has"),
        (end_early, "truncated", "3 pages never arrived|6 pages never arrived"),
        (invent_a_token, "range", "first_token 512 is outside the vocabulary"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_spoilt_handoff_is_refused_with_the_same_words_on_both_sides(
    wire: Wire, spoil: Callable[[list[KvFrame | HandoffEnd]], None], reason: str, words: str
) -> None:
    """Nothing is committed, and after it the same transfer cannot be tried again on these pages."""
    async with Decode(wire) as node:
        reservation, items = node.reserve(), planned(node.worker)
        spoil(items)
        with pytest.raises(FrameRefused, match=words) as at_sender:
            await node.sender.push(node.address, node.handoff, send(items))
        with pytest.raises(FrameRefused, match=words) as at_receiver:
            await reservation.arrival
        assert str(at_sender.value) == str(at_receiver.value)
        assert (at_sender.value.reason, at_receiver.value.reason) == (reason, reason)
        assert (node.inbox.refused, node.inbox.received_tokens) == ({reason: 1}, 0)
        with pytest.raises(HandshakeRefused, match="received already"):
            await node.sender.push(node.address, node.handoff, send(planned(node.worker)))
        node.inbox.close(reservation)


async def test_a_reservation_closed_mid_transfer_stops_the_sender_and_the_writing(wire: Wire) -> None:
    """The pages may have a new owner the moment it is closed: not a byte is written to them after that."""
    async with Decode(wire) as node:
        reservation, items = node.reserve(), planned(node.worker)
        before = list[Tensor]()

        async def frames() -> Frames:
            for index, item in enumerate(items):
                if index == 3:
                    node.inbox.close(reservation)
                    before.extend(node.bytes())
                yield item

        with pytest.raises(TransferError, match="transfer t was cancelled at the decode node"):
            await node.sender.push(node.address, node.handoff, frames())
        assert all(torch.equal(x, y) for x, y in zip(before, node.bytes(), strict=True))
        assert reservation.arrival.cancelled()
        again = node.reserve()
        assert (await node.sender.push(node.address, node.handoff, send(items))).tokens == TOKENS
        node.inbox.close(again)


async def test_late_frames_do_not_reach_pages_that_have_a_new_owner(wire: Wire) -> None:
    """The same pages and slot, while the first sender still sends and does not know yet that it is over."""
    async with Decode(wire) as node:
        old, items = node.reserve(), planned(node.worker)
        half, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> Frames:
            for index, item in enumerate(items):
                if index == 3:
                    half.set()
                    await go_on.wait()
                yield item

        first = asyncio.create_task(node.sender.push(node.address, node.handoff, slow()))
        await half.wait()
        node.inbox.close(old)
        new = node.inbox.reserve(DecodeJob(REQUEST, "u", 0), GRANT)
        handoff = replace(node.handoff, transfer_id="u", epoch=0)
        await node.sender.push(node.address, handoff, send(planned(node.worker, "u", 0, seed=4)))
        assert (await new.arrival).first_token == 9
        landed = node.bytes()
        go_on.set()
        with pytest.raises(TransferError, match="transfer t was cancelled at the decode node"):
            await first
        assert all(torch.equal(x, y) for x, y in zip(landed, node.bytes(), strict=True))
        node.inbox.close(new)


async def test_a_later_epoch_replaces_an_earlier_one_and_never_the_other_way(wire: Wire) -> None:
    async with Decode(wire) as node:
        old = node.reserve()
        new = node.inbox.reserve(DecodeJob(REQUEST, "t", 3), Grant((1, 3, 4), 0))
        with pytest.raises(TransferError, match="transfer t has moved on to epoch 3"):
            await old.arrival
        with pytest.raises(HandshakeRefused, match="transfer_id t is in use"):
            node.reserve()
        node.inbox.close(old)
        with pytest.raises(HandshakeRefused, match="epoch 2, expected 3"):
            await node.sender.push(node.address, node.handoff, send(planned(node.worker)))
        await node.sender.push(node.address, replace(node.handoff, epoch=3), send(planned(node.worker, "t", 3)))
        assert (await new.arrival).first_token == 9
        assert node.inbox.refused == {"stale": 1}
        node.inbox.close(new)


async def test_the_arrival_is_cancelled_at_the_last_moment(wire: Wire) -> None:
    """The task that waits for the arrival is cancelled while the end is on its way: an error by name, no crash."""
    async with Decode(wire) as node:
        reservation, items = node.reserve(), planned(node.worker)

        async def frames() -> Frames:
            for item in items:
                if isinstance(item, HandoffEnd):
                    reservation.arrival.cancel()  # what cancelling that task does first
                yield item

        with pytest.raises(TransferError, match="cancelled at the decode node"):
            await node.sender.push(node.address, node.handoff, frames())
        node.inbox.close(reservation)


async def test_a_sender_that_dies_fails_the_reservation(wire: Wire) -> None:
    async with Decode(wire) as node:
        reservation, items = node.reserve(), planned(node.worker)

        async def frames() -> Frames:
            yield items[0]
            raise RuntimeError("the engine died")

        with pytest.raises(Exception, match="the engine died"):
            await node.sender.push(node.address, node.handoff, frames())
        with pytest.raises(TransferError, match="the prefill node"):
            await reservation.arrival
        node.inbox.close(reservation)


async def test_an_unexpected_error_fails_the_reservation(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    """Pages beyond the pool, a bug of the caller: the waiting call hears of it instead of waiting for ever."""
    async with Decode(wire) as node:
        reservation = node.inbox.reserve(DecodeJob(REQUEST, "t", 2), Grant((50, 51, 52), 1))
        with pytest.raises(HackkvError, match="unexpected ValueError"):
            await node.sender.push(node.address, node.handoff, send(planned(node.worker)))
        with pytest.raises(TransferError, match="transfer t failed: ValueError"):
            await reservation.arrival
        node.inbox.close(reservation)
    assert "page ids" in caplog.text


async def test_a_transfer_id_is_reserved_once_and_can_be_reused_when_closed(wire: Wire) -> None:
    async with Decode(wire) as node:
        reservation = node.reserve()
        with pytest.raises(HandshakeRefused, match="transfer_id t is in use"):
            node.reserve()
        node.inbox.close(reservation)
        node.inbox.close(node.reserve())
