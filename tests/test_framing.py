"""Frames: what a writer cuts is read back bit-exact, and whatever else arrives is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import xxhash
from hack_kernels import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hackkv import framing
from hackkv.codec import PageFormat
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.errors import FrameRefused
from hackkv.framing import FrameLedger, FrameWriter, fp16_bytes, handoff_end
from hackkv.types import HandoffEnd, KvFrame, KvLayout, PlaneSpan

Content = dict[tuple[int, int], dict[str, Tensor]]
"""(layer, first page) -> planes [heads, pages, *shape]; the open page is the last one."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """A whole handoff: its shape, what it holds, and the frames it became."""

    layout: KvLayout
    format: PageFormat
    num_tokens: int
    content: Content
    frames: list[KvFrame]
    end: HandoffEnd

    @property
    def sealed(self) -> int:
        return self.num_tokens // self.layout.page_tokens

    def ledger(self) -> FrameLedger:
        return FrameLedger(self.layout, self.format, "t-1", 4, self.num_tokens, self.sealed)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def ship(
    codec: str, *, layers: int = 2, heads: int = 2, head_dim: int = 64, tokens: int = 75, step: int = 2, seed: int = 0
) -> Shipment:
    """Random bytes for every plane, written layer by layer for every `step` pages, then the open page."""
    page = make_codec(CodecConfig(name=codec, settings={"page_tokens": 32}), head_dim, load("reference")).format
    layout = KvLayout(layers, heads, head_dim, 32)
    generator = torch.Generator().manual_seed(seed)
    writer, content, frames = FrameWriter("t-1", 4), Content(), list[KvFrame]()
    sealed, rest = divmod(tokens, 32)
    for first in range(0, sealed, step):
        count = min(step, sealed - first)
        for layer in range(layers):
            planes = {
                plane.name: random_bytes((heads, count, *plane.shape), plane.dtype, generator)
                for plane in page.wire_planes
            }
            content[layer, first] = planes
            frames += writer.frames(layer, first, planes)
    for layer in range(layers) if rest else ():
        rows = {
            name: random_bytes((heads, 1, rest, head_dim), torch.float16, generator) for name in ("open_k", "open_v")
        }
        content[layer, sealed] = rows
        frames += writer.frames(layer, sealed, rows, rest)
    return Shipment(layout, page, tokens, content, frames, writer.end(17))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    flat = [z.contiguous().flatten().view(torch.uint8) for z in (x, y)]
    return (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(flat[0], flat[1])


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 96]),
    tokens=st.integers(1, 230),
    step=st.integers(1, 8),
    frame_pages=st.integers(0, 4),
)
def test_what_is_written_is_read_back(
    codec: str, layers: int, heads: int, head_dim: int, tokens: int, step: int, frame_pages: int
) -> None:
    """For every codec, shape, chunking and frame size: bit-exact, every page once, no frame above the cap."""
    page = make_codec(CodecConfig(name=codec, settings={"page_tokens": 32}), head_dim, load("reference")).format
    cap = frame_pages * heads * page.wire_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "MAX_FRAME_BYTES", cap)
        shipment = ship(codec, layers=layers, heads=heads, head_dim=head_dim, tokens=tokens, step=step)
    ledger = shipment.ledger()
    for seq, frame in enumerate(shipment.frames):
        assert frame.seq == seq
        assert len(frame.payload) <= cap or frame.page_count == frame.head_count == 1
        first = max(page for layer, page in shipment.content if layer == frame.layer and page <= frame.page_start)
        planes, offset = shipment.content[frame.layer, first], frame.page_start - first
        accepted = ledger.accept(frame)
        assert list(accepted) == list(planes)
        heads_sent = slice(frame.head_start, frame.head_start + frame.head_count)
        for name, plane in accepted.items():
            assert same_bytes(plane, planes[name][heads_sent, offset : offset + frame.page_count]), name
    ledger.finish(shipment.end)
    assert shipment.end == handoff_end("t-1", 4, len(shipment.frames), 17)


@pytest.mark.parametrize("heads", [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_head_ranges_are_accepted_in_any_cut(codec: str, heads: tuple[int, ...]) -> None:
    """A tensor-parallel sender sends its own KV heads only; together they cover everything, in any order of heads."""
    shipment = ship(codec, heads=3)
    ledger, writer = shipment.ledger(), FrameWriter("t-1", 4)
    for (layer, page), planes in shipment.content.items():
        for start, stop in reversed(list(pairwise(heads))):
            part = {name: plane[start:stop] for name, plane in planes.items()}
            rows = part["open_k"].shape[2] if "open_k" in part else 0
            (frame,) = writer.frames(layer, page, part, rows, head_start=start)
            accepted = ledger.accept(frame)
            assert all(same_bytes(accepted[name], plane) for name, plane in part.items())
    ledger.finish(writer.end(0))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_bytes_in_the_wrong_place_are_refused(codec: str) -> None:
    """Two frames that swap their layers cover every page once, with bytes that are whole: only the seed tells."""
    shipment = ship(codec, heads=2, layers=2)
    first, second = shipment.frames[:2]
    assert (first.layer, second.layer) == (0, 1)
    with pytest.raises(FrameRefused, match="checksum of plane"):
        shipment.ledger().accept(replace(first, layer=1))


def changed_span(frame: KvFrame, index: int, **changes: Any) -> KvFrame:
    planes = list(frame.planes)
    planes[index] = replace(planes[index], **changes)
    return replace(frame, planes=tuple(planes))


def grown(frame: KvFrame, index: int = 0) -> KvFrame:
    """Declares and carries one byte more, with a checksum that holds."""
    at = sum(span.raw_bytes for span in frame.planes[: index + 1])
    payload = frame.payload[:at] + b"\0" + frame.payload[at:]
    begin, size = at - frame.planes[index].raw_bytes, frame.planes[index].raw_bytes + 1
    checksum = xxhash.xxh3_64_intdigest(payload[begin : begin + size])
    return replace(changed_span(frame, index, raw_bytes=size, coded_bytes=size, checksum=checksum), payload=payload)


FLAWS: dict[str, tuple[Callable[[KvFrame], KvFrame], str, str]] = {
    "another transfer": (lambda f: replace(f, transfer_id="t-2"), "stale", "transfer_id 't-2' in transfer 't-1'"),
    "an older epoch": (lambda f: replace(f, epoch=3), "stale", "epoch 3 in epoch 4"),
    "a later epoch": (lambda f: replace(f, epoch=5), "stale", "epoch 5 in epoch 4"),
    "sent before": (lambda f: replace(f, seq=0), "duplicate", "frame 0 arrived where 2 was due"),
    "out of order": (lambda f: replace(f, seq=3), "order", "frame 3 arrived where 2 was due"),
    "the same pages again": (lambda f: replace(f, page_start=0), "duplicate", "came twice"),
    "no such layer": (lambda f: replace(f, layer=2), "range", r"layer range 2\+1 does not lie in 2"),
    "a negative layer": (lambda f: replace(f, layer=-1), "range", r"layer range -1\+1"),
    "no such head": (lambda f: replace(f, head_start=1), "range", r"KV head range 1\+2 does not lie in 2"),
    "no heads": (lambda f: replace(f, head_count=0), "range", r"KV head range 0\+0"),
    "negative heads": (lambda f: replace(f, head_start=-1), "range", r"KV head range -1\+2"),
    "no such page": (lambda f: replace(f, page_start=9), "range", r"page range 9\+2"),
    "no pages": (lambda f: replace(f, page_count=0), "range", r"page range 2\+0"),
    "too many pages": (lambda f: replace(f, page_count=2**40), "range", "page range"),
    "into the open page": (lambda f: replace(f, page_start=3, page_count=2), "range", r"0 rows for pages 3\+2"),
    "rows in sealed pages": (lambda f: replace(f, rows=11), "range", r"11 rows for pages 2\+2"),
    "fewer pages than bytes": (lambda f: replace(f, page_count=1), "oversized", "declares"),
    "fewer heads than bytes": (lambda f: replace(f, head_count=1), "oversized", "declares"),
    "an oversized plane": (lambda f: changed_span(f, 0, raw_bytes=2**50), "oversized", "declares 1125899906842624 raw"),
    "an oversized code": (lambda f: changed_span(f, 1, coded_bytes=2**50), "oversized", "1125899906842624 coded"),
    "a negative size": (lambda f: changed_span(f, 1, raw_bytes=-1), "oversized", "declares -1 raw"),
    "one byte more": (grown, "oversized", "declares"),
    "a wrong plane": (lambda f: changed_span(f, 0, name="k_sums"), "planes", "k_sums"),
    "planes in another order": (lambda f: replace(f, planes=f.planes[::-1]), "planes", "planes"),
    "a plane missing": (lambda f: replace(f, planes=f.planes[:-1]), "planes", "planes"),
    "a plane twice": (lambda f: replace(f, planes=(*f.planes, f.planes[0])), "planes", "planes"),
    "no planes": (lambda f: replace(f, planes=()), "planes", r"planes \[\]"),
    "a short payload": (lambda f: replace(f, payload=f.payload[:-1]), "truncated", "payload has"),
    "no payload": (lambda f: replace(f, payload=b""), "truncated", "payload has 0 bytes"),
    "a long payload": (lambda f: replace(f, payload=f.payload + b"\0"), "oversized", "payload has"),
    "a wrong checksum": (lambda f: changed_span(f, 1, checksum=0), "corrupt", "checksum of plane"),
}


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_each_flaw_is_named_and_final(codec: str, flaw: str) -> None:
    """The third frame of a handoff is spoilt: refused for the right reason, and even its honest form is not believed
    after that, nor is the end."""
    change, reason, words = FLAWS[flaw]
    shipment = ship(codec, tokens=4 * 32 + 11)
    ledger = shipment.ledger()
    for frame in shipment.frames[:2]:
        ledger.accept(frame)
    honest = shipment.frames[2]
    assert (honest.layer, honest.page_start, honest.page_count) == (0, 2, 2)
    with pytest.raises(FrameRefused, match=words) as caught:
        ledger.accept(change(honest))
    assert caught.value.reason == reason
    for frame in shipment.frames[2:]:
        with pytest.raises(FrameRefused, match="is over"):
            ledger.accept(frame)
    with pytest.raises(FrameRefused, match="is over"):
        ledger.finish(shipment.end)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_one_wrong_bit_in_any_plane_is_named(codec: str) -> None:
    """First, last and a random bit of every plane, of sealed pages and of the open page."""
    shipment = ship(codec, tokens=2 * 32 + 3)
    chance = random.Random(5)
    for seq in (0, len(shipment.frames) - 1):
        frame, at = shipment.frames[seq], 0
        for span in frame.planes:
            for bit in (0, span.raw_bytes * 8 - 1, chance.randrange(span.raw_bytes * 8)):
                payload = bytearray(frame.payload)
                payload[at + bit // 8] ^= 1 << bit % 8
                ledger = shipment.ledger()
                for honest in shipment.frames[:seq]:
                    ledger.accept(honest)
                where = f"checksum of plane {span.name}, layer {frame.layer}, frame {seq}"
                with pytest.raises(FrameRefused, match=where) as caught:
                    ledger.accept(replace(frame, payload=bytes(payload)))
                assert caught.value.reason == "corrupt"
            at += span.raw_bytes


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
    """Each frame left out in turn, with all counters right: the first missing page is named."""
    shipment = ship("hack", tokens=4 * 32 + 11)
    for left_out in shipment.content:
        ledger, writer = shipment.ledger(), FrameWriter("t-1", 4)
        for (layer, page), planes in shipment.content.items():
            if (layer, page) != left_out:
                rows = planes["open_k"].shape[2] if "open_k" in planes else 0
                for frame in writer.frames(layer, page, planes, rows):
                    ledger.accept(frame)
        where = f"the first is layer {left_out[0]}, KV head 0, page {left_out[1]}"
        with pytest.raises(FrameRefused, match=where) as caught:
            ledger.finish(writer.end(0))
        assert caught.value.reason == "truncated"


@pytest.mark.parametrize("rows", [0, 10, 12, 31, 32, 2**40])
def test_the_open_page_must_have_the_rows_that_are_due(rows: int) -> None:
    """Its size follows from the handoff; a frame cannot ask for more memory, nor leave rows as they were."""
    shipment = ship("fp16", tokens=32 + 11)
    ledger = shipment.ledger()
    *sealed, tail, _ = shipment.frames
    for frame in sealed:
        ledger.accept(frame)
    with pytest.raises(FrameRefused) as caught:
        ledger.accept(replace(tail, rows=rows))
    assert caught.value.reason == "range"


def mutate(frame: KvFrame, chance: random.Random) -> KvFrame:
    """Flip a bit, or set another value, in one field or in several."""
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        name = chance.choice([field.name for field in fields(KvFrame) if field.name != "header_bytes"])
        value = getattr(frame, name)
        if name == "planes":
            planes = list(value) or [PlaneSpan("k_codes", 0, 0, 0)]
            index = chance.randrange(len(planes))
            part = chance.choice(["name", "raw_bytes", "coded_bytes", "checksum", "drop", "double", "swap"])
            if part == "drop":
                del planes[index]
            elif part == "double":
                planes.append(planes[index])
            elif part == "swap":
                other = chance.randrange(len(planes))
                planes[index], planes[other] = planes[other], planes[index]
            else:
                planes[index] = replace(planes[index], **{part: spoilt(getattr(planes[index], part), chance)})
            frame = replace(frame, planes=tuple(planes))
        else:
            frame = replace(frame, **{name: spoilt(value, chance)})
    return frame


def spoilt(value: Any, chance: random.Random) -> Any:
    if isinstance(value, int):
        return chance.choice([value ^ (1 << chance.randrange(64)), value + 1, value - 1, -value, 0, 2**63])
    if isinstance(value, str):
        return chance.choice([value + "x", value[:-1], "", "open_k", "v_codes"])
    at = chance.randrange(len(value) + 1)
    flipped = value[:at] + bytes([value[at] ^ (1 << chance.randrange(8))]) + value[at + 1 :] if at < len(value) else b""
    return chance.choice([flipped, flipped, value[:at], value + value[:at]])


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_five_thousand_mutated_frames(codec: str) -> None:
    """No exception but `FrameRefused`, and no handoff ends well but the honest one.

    Checksums cover the planes and not the header, so a frame that claims the place of another one passes by itself; the
    frame whose place it took, or the end, is refused then.
    """
    chance = random.Random(codec)
    shipment = ship(codec, layers=2, heads=2, tokens=3 * 32 + 5, step=1)
    reasons, displaced = set(), 0
    for _ in range(5000):
        ledger, seq = shipment.ledger(), chance.randrange(len(shipment.frames))
        mutant = mutate(shipment.frames[seq], chance)
        if mutant == shipment.frames[seq]:
            continue
        for frame in shipment.frames[:seq]:
            ledger.accept(frame)
        try:
            ledger.accept(mutant)
        except FrameRefused as error:
            reasons.add(error.reason)
            continue
        displaced += 1
        with pytest.raises(FrameRefused):
            finish_honestly(shipment, ledger, seq + 1)
    assert reasons == {"stale", "duplicate", "order", "range", "planes", "oversized", "truncated", "corrupt"}
    assert displaced < 100


def finish_honestly(shipment: Shipment, ledger: FrameLedger, seq: int) -> None:
    for frame in shipment.frames[seq:]:
        ledger.accept(frame)
    ledger.finish(shipment.end)


def test_fp16_bytes_are_two_bytes_for_each_number_of_k_and_v() -> None:
    assert fp16_bytes(KvLayout(32, 8, 128, 64), 1) == 128 * 1024
