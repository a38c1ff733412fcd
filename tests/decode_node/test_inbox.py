"""Handoffs land whole or not at all, over every wire of `WIRES` and for every codec of `CODECS`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_node.pages import Grant
from hackkv.codecs import CODECS
from hackkv.errors import FrameRefused, HackkvError, HandshakeRefused, TransferError
from hackkv.model.worker import WIRE_VERSION
from hackkv.types import WIRE_FORM, DecodeJob, Fingerprint, Handoff, HandoffEnd, KvFrame
from hackkv.wire_form import RAW, wire_form
from tests.decode_node.receiving import GRANT, REQUEST, TOKENS, Decode, Frames, Untouched, planned, send
from tests.handoffs import FORMS
from transport.wires import Loopback


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
async def test_a_handoff_lands_bit_exact_and_is_counted_by_plane(wire: Loopback, codec: str) -> None:
    """In the granted pages and slot and nowhere else; the receipt counts bytes as they came, plane by plane."""
    async with Decode(wire, codec) as node:
        before, reservation, items = node.bytes(), node.reserve(), planned(node.worker)
        receipt = await node.sender.push(node.address, node.handoff, send(items))
        arrival = await reservation.arrival
        assert (arrival.first_token, arrival.receipt) == (9, receipt)
        due, sent = Counter[str](), node.worker.footprint.sent_pages(TOKENS)
        for plane in (plane for planes in node.worker.codec.wire_planes for plane in planes):
            due[plane.name] += 2 * len(sent) * plane.page_bytes
        exact_rows = node.worker.footprint.exact_rows(TOKENS)
        channels = sum(fmt.head_dim for fmt in node.worker.codec.formats)
        due |= dict.fromkeys(("open_k", "open_v"), 2 * channels * exact_rows * 2)
        raw, coded = Counter[str](), Counter[str]()
        for item in items:
            for span in item.planes if isinstance(item, KvFrame) else ():
                raw[span.name] += span.raw_bytes
                coded[span.name] += span.coded_bytes
        assert raw == +due
        assert dict(receipt.bytes_by_plane) == coded
        fp16_bytes = 2 * 2 * 2 * 2 * 64 * node.tokens
        assert (receipt.transfer_id, receipt.tokens, receipt.fp16_bytes) == ("t", node.tokens, fp16_bytes)
        assert 0 < receipt.wire_decode_s <= receipt.receive_s
        assert receipt.header_bytes < 64 * 5 * len(items)
        assert node.inbox.received_tokens == node.tokens
        uncoded = planned(node.worker, form=RAW)
        frames = [item for item in uncoded if isinstance(item, KvFrame) and not item.rows]
        for layer, pool in enumerate(node.runner.memory.pools):
            planes = node.worker.codec.to_wire(layer, pool, torch.tensor(GRANT.pages[:2]))
            for page in sent:
                (frame,) = (frame for frame in frames if (frame.layer, frame.page_start) == (layer, page))
                landed = b"".join(
                    p[:, page].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in planes.values()
                )
                assert landed == frame.payload
            for run in node.worker.footprint.runs(TOKENS):
                assert bool((pool.open_k[1, :, run] == layer + 0.5).all())
                assert bool((pool.open_v[1, :, run] == layer + 0.5).all())
        slots = [each for pool in node.runner.memory.pools for each in (*[False] * len(pool.planes), True, True)]
        for is_slot, old, new in zip(slots, before, node.bytes(), strict=True):
            held = [1] if is_slot else list(GRANT.pages[:2])
            others = [i for i in range(old.shape[0]) if i not in held]
            assert torch.equal(old[others], new[others]), "written outside of the grant"
        node.inbox.close(reservation)


def with_field(handoff: Handoff, name: str, value: str) -> Handoff:
    fields = dict(handoff.fingerprint.fields) | {name: value}
    return replace(handoff, fingerprint=Fingerprint(tuple(fields.items())))


def other_fingerprint(handoff: Handoff) -> Handoff:
    return with_field(handoff, "codec.seed", "7")


def unknown_form(handoff: Handoff) -> Handoff:
    return with_field(handoff, WIRE_FORM, "lz9")


def less_fingerprint(handoff: Handoff) -> Handoff:
    return replace(handoff, fingerprint=Fingerprint(handoff.fingerprint.fields[1:]))


@pytest.mark.parametrize(
    ("change", "words", "reason", "fails_reservation"),
    [
        (other_fingerprint, "fingerprints differ in codec.seed: '0' here, '7' at the peer", "fingerprint", True),
        (less_fingerprint, f"fingerprints differ in wire_version: '{WIRE_VERSION}' here", "fingerprint", True),
        (unknown_form, "wire form 'lz9' is unknown here; known: raw", "fingerprint", True),
        (lambda h: replace(h, num_tokens=TOKENS + 1), f"num_tokens {TOKENS + 1}, expected {TOKENS}", "length", True),
        (lambda h: replace(h, epoch=1), "epoch 1, expected 2", "stale", False),
        (lambda h: replace(h, transfer_id="u"), "transfer_id 'u' is not expected here", "unknown", False),
    ],
    ids=["fingerprint", "missing field", "wire form", "num_tokens", "stale", "unknown"],
)
async def test_a_handshake_is_refused_by_name_before_any_frame(
    wire: Loopback, change: Callable[[Handoff], Handoff], words: str, reason: str, fails_reservation: bool
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


async def test_a_second_push_of_a_transfer_is_refused_and_the_first_lands(wire: Loopback) -> None:
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


async def test_a_reservation_closed_mid_transfer_stops_the_sender_and_the_writing(wire: Loopback) -> None:
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


async def test_late_frames_do_not_reach_pages_that_have_a_new_owner(wire: Loopback) -> None:
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


async def test_a_later_epoch_replaces_an_earlier_one_and_never_the_other_way(wire: Loopback) -> None:
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


async def test_the_arrival_is_cancelled_at_the_last_moment(wire: Loopback) -> None:
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


async def test_a_sender_that_dies_fails_the_reservation(wire: Loopback) -> None:
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


async def test_an_unexpected_error_fails_the_reservation(wire: Loopback, caplog: pytest.LogCaptureFixture) -> None:
    """Pages beyond the pool, a bug of the caller: the waiting call hears of it instead of waiting for ever."""
    async with Decode(wire) as node:
        reservation = node.inbox.reserve(DecodeJob(REQUEST, "t", 2), Grant((50, 51, 52), 1))
        with pytest.raises(HackkvError, match="unexpected ValueError"):
            await node.sender.push(node.address, node.handoff, send(planned(node.worker)))
        with pytest.raises(TransferError, match="transfer t failed: ValueError"):
            await reservation.arrival
        node.inbox.close(reservation)
    assert "page ids" in caplog.text


async def test_a_transfer_id_is_reserved_once_and_can_be_reused_when_closed(wire: Loopback) -> None:
    async with Decode(wire) as node:
        reservation = node.reserve()
        with pytest.raises(HandshakeRefused, match="transfer_id t is in use"):
            node.reserve()
        node.inbox.close(reservation)
        node.inbox.close(node.reserve())


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("sent", FORMS)
@pytest.mark.parametrize("here", sorted(CODECS))
async def test_the_sender_chooses_the_wire_form(wire: Loopback, here: str, sent: str) -> None:
    """The receiver's own setting does not matter: pages at rest are the same, so it only has to know the form."""
    landed = []
    for name in ("raw", sent):
        async with Decode(wire, here) as node:
            reservation, items = node.reserve(), planned(node.worker, form=wire_form(name))
            await node.sender.push(node.address, with_field(node.handoff, WIRE_FORM, name), send(items))
            assert (await reservation.arrival).receipt.tokens == node.tokens
            landed.append(node.bytes())
            node.inbox.close(reservation)
    assert all(torch.equal(x, y) for x, y in zip(*landed, strict=True))


@pytest.mark.parametrize("sent", [name for name in FORMS if name != "raw"])
async def test_a_form_that_the_handshake_did_not_name_is_refused(wire: Loopback, sent: str) -> None:
    async with Decode(wire) as node:
        form = wire_form(sent)
        reservation, items = node.reserve(), planned(node.worker, form=form)
        with pytest.raises(FrameRefused, match=f"is coded by method {form.method}, agreed is raw") as caught:
            await node.sender.push(node.address, with_field(node.handoff, WIRE_FORM, "raw"), send(items))
        assert caught.value.reason == "method"
        node.inbox.close(reservation)
