"""Frames that a writer cuts are read back bit-exact. Anything else is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hackkv import framing
from hackkv.codec import planes_bytes
from hackkv.codec_footprint import fp16_bytes
from hackkv.codecs import CODECS
from hackkv.errors import FrameRefused
from hackkv.framing import handoff_end, lacked_part, reissued
from hackkv.held import HeldKv
from hackkv.ledger import FrameLedger
from hackkv.types import HandoffEnd, KvFrame, KvLayout, KvShape
from tests.handoffs import codec_of, rows_of, same_bytes, ship


@settings(max_examples=60)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 96]),
    tokens=st.integers(1, 230),
    step=st.integers(1, 8),
    together=st.integers(1, 3),
    frame_pages=st.integers(0, 4),
)
def test_what_is_written_is_read_back(
    codec: str, layers: int, heads: int, head_dim: int, tokens: int, step: int, together: int, frame_pages: int
) -> None:
    """For every codec, shape, chunking and frame size, pages come bit-exact and once, and no frame exceeds the cap."""
    wire_planes = codec_of(codec, KvShape(layers, heads, head_dim)).wire_planes
    cap = frame_pages * heads * max(map(planes_bytes, wire_planes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "MAX_FRAME_BYTES", cap)
        shipment = ship(
            codec, layers=layers, heads=heads, head_dim=head_dim, tokens=tokens, step=step, together=together
        )
    ledger = shipment.ledger()
    for seq, frame in enumerate(shipment.frames):
        assert frame.seq == seq
        assert len(frame.payload) <= cap or frame.page_count == frame.head_count == 1
        first = max(page for layer, page in shipment.content if layer == frame.layer and page <= frame.page_start)
        offset, heads_sent = frame.page_start - first, slice(frame.head_start, frame.head_start + frame.head_count)
        for layer, accepted in zip(frame.layers, ledger.accept(frame), strict=True):
            planes = shipment.content[layer, first]
            assert list(accepted) == list(planes)
            for name, plane in accepted.items():
                assert same_bytes(plane, planes[name][heads_sent, offset : offset + frame.page_count]), name
    ledger.finish(shipment.end)
    assert shipment.end == handoff_end("t-1", 4, len(shipment.frames), 17)


@pytest.mark.parametrize("heads", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_head_ranges_are_accepted_in_any_cut(codec: str, heads: tuple[int, ...]) -> None:
    """A tensor-parallel sender sends its own KV heads only. Together, senders cover all heads, in any order."""
    shipment = ship(codec, heads=3)
    ledger, writer = shipment.ledger(), shipment.writer()
    for (layer, page), planes in shipment.content.items():
        for start, stop in reversed(list(pairwise(heads))):
            part = {name: plane[start:stop] for name, plane in planes.items()}
            (frame,) = writer.frames(layer, page, [part], rows_of(part), head_start=start)
            (accepted,) = ledger.accept(frame)
            assert all(same_bytes(accepted[name], plane) for name, plane in part.items())
    ledger.finish(writer.end(0))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_bytes_in_the_wrong_place_are_refused(codec: str) -> None:
    """Two frames that swap their layers cover every page once with undamaged bytes. Only the seed of the checksum
    reveals them."""
    shipment = ship(codec, heads=2, layers=4)
    ledger = shipment.ledger()
    for frame in shipment.frames[:2]:
        ledger.accept(frame)
    first, second = shipment.frames[2:4]
    assert (first.layer, second.layer) == (2, 3)  # both layers have one format in every codec
    with pytest.raises(FrameRefused, match="checksum of plane"):
        ledger.accept(replace(first, layer=3))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_later_epoch_has_the_same_bytes_and_is_believed_there_only(codec: str) -> None:
    """A frame is sent again without being decoded. Damaged bytes get no new checksum."""
    shipment = ship(codec)
    frame = shipment.frames[0]
    again = reissued(frame, 5, frame.seq)
    assert reissued(again, 4, frame.seq) == frame
    assert again.payload is frame.payload
    with pytest.raises(FrameRefused, match="checksum of plane"):
        shipment.ledger().accept(replace(again, epoch=4))
    payload = bytes(frame.payload)
    with pytest.raises(FrameRefused, match="checksum of plane"):
        reissued(replace(frame, payload=payload[:-1] + bytes([payload[-1] ^ 1])), 5, frame.seq)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_no_plane_grows_and_headers_say_how_each_is_coded(codec: str) -> None:
    """Planes that shrink are coded by the codec's wire form. The others travel as they are."""
    shipment = ship(codec, tokens=4 * 32 + 11)
    wire, methods = shipment.codec.wire_form, set()
    for frame in shipment.frames:
        for span in frame.planes:
            methods.add(span.method)
            assert span.coded_bytes <= (wire.cap(span.raw_bytes) if span.method else span.raw_bytes)
        assert len(frame.payload) == sum(span.coded_bytes for span in frame.planes)
    codes = any("codes" in plane.name for plane in shipment.codec.wire_planes[0])
    assert methods == ({0, wire.method} if codes else {0})


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_one_wrong_bit_in_any_plane_is_named(codec: str) -> None:
    """The first, the last and a random bit of every plane are flipped, in sealed pages and in the open page."""
    shipment = ship(codec, tokens=2 * 32 + 3)
    chance = random.Random(5)
    for seq in (0, len(shipment.frames) - 1):
        frame, at = shipment.frames[seq], 0
        for span in frame.planes:
            for bit in (0, span.coded_bytes * 8 - 1, chance.randrange(span.coded_bytes * 8)):
                payload = bytearray(bytes(frame.payload))
                payload[at + bit // 8] ^= 1 << bit % 8
                ledger = shipment.ledger()
                for honest in shipment.frames[:seq]:
                    ledger.accept(honest)
                where = f"checksum of plane {span.name}, layer {frame.layer}, frame {seq}"
                with pytest.raises(FrameRefused, match=where) as caught:
                    ledger.accept(replace(frame, payload=bytes(payload)))
                assert caught.value.reason == "corrupt"
            at += span.coded_bytes


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (lambda end: replace(end, transfer_id="t-2"), "stale", "transfer_id"),
        (lambda end: replace(end, epoch=0), "stale", "epoch 0"),
        (lambda end: replace(end, num_frames=99), "truncated", "the sender counts 99 frames, 6 arrived"),
        (lambda end: replace(end, first_token=18), "corrupt", "checksum of the end"),
        (lambda end: replace(end, checksum=0), "corrupt", "checksum of the end"),
    ],
)
def test_a_wrong_end_is_named(change: Callable[[HandoffEnd], HandoffEnd], reason: str, words: str) -> None:
    shipment = ship("hack", tokens=4 * 32 + 11)
    ledger = shipment.ledger()
    for frame in shipment.frames:
        ledger.accept(frame)
    with pytest.raises(FrameRefused, match=words) as caught:
        ledger.finish(change(shipment.end))
    assert caught.value.reason == reason


def test_every_page_that_is_missing_is_missed() -> None:
    """Each frame is left out in turn, with all counters right. The error names the first missing page."""
    shipment = ship("hack", tokens=4 * 32 + 11)
    for left_out in shipment.content:
        ledger, writer = shipment.ledger(), shipment.writer()
        for (layer, page), planes in shipment.content.items():
            if (layer, page) != left_out:
                for frame in writer.frames(layer, page, [planes], rows_of(planes)):
                    ledger.accept(frame)
        where = f"the first is layer {left_out[0]}, KV head 0, page {left_out[1]}"
        with pytest.raises(FrameRefused, match=where) as caught:
            ledger.finish(writer.end(0))
        assert caught.value.reason == "truncated"


@pytest.mark.parametrize("rows", [0, 10, 12, 31, 32, 2**40])
def test_the_open_page_must_have_the_rows_that_are_due(rows: int) -> None:
    """The size of the open page follows from the handoff. A frame cannot ask for more memory, nor omit rows."""
    shipment = ship("fp16", tokens=32 + 11)
    ledger = shipment.ledger()
    *sealed, tail, _ = shipment.frames
    for frame in sealed:
        ledger.accept(frame)
    with pytest.raises(FrameRefused) as caught:
        ledger.accept(replace(tail, rows=rows))
    assert caught.value.reason == "range"


def test_fp16_bytes_are_two_bytes_for_each_number_of_k_and_v() -> None:
    assert fp16_bytes(KvLayout(32, 8, 128, 64), 1) == 128 * 1024


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("held", [HeldKv(pages, exact) for pages in range(5) for exact in sorted({0, pages})], ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_the_receiver_holds_is_cut_off_and_must_not_come(codec: str, held: HeldKv, together: int) -> None:
    """However frames are cut, the parts that remain are a whole handoff of the other pages, bit-exact."""
    shipment = ship(codec, tokens=4 * 32 + 11, step=3, together=together)
    expected, frames = replace(shipment.expected(), held=held), list[KvFrame]()
    for frame in shipment.frames:
        part = lacked_part(frame, expected)
        if part is not None:
            frames.append(reissued(part, 4, len(frames)))
    ledger = FrameLedger("t-1", 4, expected)
    for frame in frames:
        first = max(page for layer, page in shipment.content if layer == frame.layer and page <= frame.page_start)
        offset = frame.page_start - first
        for layer, planes in zip(frame.layers, ledger.accept(frame), strict=True):
            for name, plane in planes.items():
                whole = shipment.content[layer, first][name]
                due = whole[:, :, -frame.rows :] if frame.rows else whole[:, offset:][:, : frame.page_count]
                assert same_bytes(plane, due)
    ledger.finish(handoff_end("t-1", 4, len(frames), 17))
    assert all(frame.rows in (0, expected.exact_rows) for frame in frames)
    head, exact = shipment.frames[0], shipment.frames[-1]
    if head.page_start < held.pages:
        with pytest.raises(FrameRefused, match=f"page {head.page_start}: the first {held.pages} are here"):
            FrameLedger("t-1", 4, expected).accept(head)
    if exact.rows > expected.exact_rows:
        with pytest.raises(FrameRefused, match=f"{exact.rows} rows for pages 4"):
            FrameLedger("t-1", 4, expected).accept(replace(exact, seq=0))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_page_travels_sealed_or_as_exact_rows(codec: str) -> None:
    """It never travels as both: a receiver with the rows seals them itself, and refuses the sealed page."""
    shipment = ship(codec, tokens=4 * 32 + 11)
    expected, sizes = shipment.expected(), shipment.expected().footprint
    exact = sizes.exact_pages(shipment.num_tokens)
    assert sorted((*expected.sent_pages, *exact)) == list(range(expected.sealed))
    for page in exact:
        planes = {plane.name: torch.zeros((2, 1, *plane.shape), dtype=plane.dtype) for plane in expected.planes(0, 0)}
        (frame,) = shipment.writer().frames(0, page, [planes])
        with pytest.raises(FrameRefused, match="some come as exact rows") as caught:
            shipment.ledger().accept(frame)
        assert caught.value.reason == "range"
