"""Spoilt handoffs are refused with the same words on both sides, over every wire of `WIRES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hackkv.errors import FrameRefused, HandshakeRefused
from hackkv.framing import handoff_end
from hackkv.types import HandoffEnd, KvFrame
from tests.decode_node.receiving import Decode, planned, send
from transport.wires import Loopback


def frame_at(items: list[KvFrame | HandoffEnd], index: int) -> KvFrame:
    item = items[index]
    assert isinstance(item, KvFrame)
    return item


def corrupt(items: list[KvFrame | HandoffEnd]) -> None:
    frame = frame_at(items, 3)
    payload = bytes(frame.payload)
    items[3] = replace(frame, payload=bytes([payload[0] ^ 4]) + payload[1:])


def truncate(items: list[KvFrame | HandoffEnd]) -> None:
    items[3] = replace(frame_at(items, 3), payload=bytes(frame_at(items, 3).payload)[:-1])


def reorder(items: list[KvFrame | HandoffEnd]) -> None:
    items[3], items[4] = items[4], items[3]


def duplicate(items: list[KvFrame | HandoffEnd]) -> None:
    items.insert(3, items[2])


def stale(items: list[KvFrame | HandoffEnd]) -> None:
    items[3] = replace(frame_at(items, 3), epoch=1)


def oversize(items: list[KvFrame | HandoffEnd]) -> None:
    frame = frame_at(items, 3)
    items[3] = replace(frame, payload=bytes(frame.payload) + b"\0" * 100)


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
    wire: Loopback, spoil: Callable[[list[KvFrame | HandoffEnd]], None], reason: str, words: str
) -> None:
    """Nothing is committed, and the same transfer cannot be tried again on these pages."""
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
