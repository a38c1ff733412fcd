"""Frames with one flaw or several are refused by name, and no frame is accepted after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import xxhash

from hackkv.codecs import CODECS
from hackkv.errors import FrameRefused
from hackkv.ledger import FrameLedger
from hackkv.types import KvFrame, PlaneSpan
from tests.handoffs import Shipment, changed_span, ship


def grown(frame: KvFrame, index: int = 0) -> KvFrame:
    """A frame that declares and carries one byte more, with a right checksum."""
    span = frame.planes[index]
    at = sum(span.coded_bytes for span in frame.planes[: index + 1])
    whole = bytes(frame.payload)
    payload = whole[:at] + b"\0" + whole[at:]
    checksum = xxhash.xxh3_64_intdigest(payload[at - span.coded_bytes : at + 1])
    sizes = {"raw_bytes": span.raw_bytes + 1, "coded_bytes": span.coded_bytes + 1}
    return replace(changed_span(frame, index, **sizes, checksum=checksum), payload=payload)


FLAWS: dict[str, tuple[Callable[[KvFrame], KvFrame], str, str]] = {
    "another transfer": (lambda f: replace(f, transfer_id="t-2"), "stale", "transfer_id 't-2' in transfer 't-1'"),
    "an older epoch": (lambda f: replace(f, epoch=3), "stale", "epoch 3 in epoch 4"),
    "a later epoch": (lambda f: replace(f, epoch=5), "stale", "epoch 5 in epoch 4"),
    "sent before": (lambda f: replace(f, seq=0), "duplicate", "frame 0 arrived where 2 was due"),
    "out of order": (lambda f: replace(f, seq=3), "order", "frame 3 arrived where 2 was due"),
    "the same pages again": (lambda f: replace(f, page_start=f.page_start - 2), "duplicate", "came twice"),
    "no such layer": (lambda f: replace(f, layer=2), "range", r"layer range 2\+1 does not lie in 2"),
    "more layers than there are": (lambda f: replace(f, layer_count=3), "range", r"layer range 0\+3 does not lie in 2"),
    "more layers than planes": (lambda f: replace(f, layer_count=2), "planes", "planes"),
    "no layers": (lambda f: replace(f, layer_count=0), "range", r"layer range 0\+0"),
    "too many layers": (lambda f: replace(f, layer_count=2**40), "range", "layer range"),
    "a negative layer": (lambda f: replace(f, layer=-1), "range", r"layer range -1\+1"),
    "no such head": (lambda f: replace(f, head_start=1), "range", r"KV head range 1\+2 does not lie in 2"),
    "no heads": (lambda f: replace(f, head_count=0), "range", r"KV head range 0\+0"),
    "negative heads": (lambda f: replace(f, head_start=-1), "range", r"KV head range -1\+2"),
    "no such page": (lambda f: replace(f, page_start=9), "range", r"page range 9\+2"),
    "no pages": (lambda f: replace(f, page_count=0), "range", r"page range <page>\+0"),
    "too many pages": (lambda f: replace(f, page_count=2**40), "range", "page range"),
    "into the open page": (
        lambda f: replace(f, page_count=3),
        "range",
        r"0 rows for pages <page>\+3|pages <page>\+3: some come as exact rows",
    ),
    "rows in sealed pages": (lambda f: replace(f, rows=11), "range", r"11 rows for pages <page>\+2"),
    "fewer pages than bytes": (lambda f: replace(f, page_count=1), "oversized", "declares"),
    "fewer heads than bytes": (lambda f: replace(f, head_count=1), "oversized", "declares"),
    "an oversized plane": (lambda f: changed_span(f, 0, raw_bytes=2**50), "oversized", "declares 1125899906842624 raw"),
    "an oversized code": (lambda f: changed_span(f, 1, coded_bytes=2**50), "oversized", "1125899906842624 coded"),
    "a negative size": (lambda f: changed_span(f, 1, raw_bytes=-1), "oversized", "declares -1 raw"),
    "a code as large as the plane": (
        lambda f: changed_span(f, 0, method=1, coded_bytes=f.planes[0].raw_bytes),
        "method|oversized",
        "coded by method 1, agreed is (raw|rans)|declares",
    ),
    "a method that nobody agreed on": (lambda f: changed_span(f, 0, method=9), "method", "coded by method 9"),
    "a negative method": (lambda f: changed_span(f, 0, method=-1), "method", "coded by method -1"),
    "one byte more": (grown, "oversized", "declares"),
    "a wrong plane": (lambda f: changed_span(f, 0, name="k_sums"), "planes", "k_sums"),
    "planes in another order": (lambda f: replace(f, planes=f.planes[::-1]), "planes", "planes"),
    "a plane missing": (lambda f: replace(f, planes=f.planes[:-1]), "planes", "planes"),
    "a plane twice": (lambda f: replace(f, planes=(*f.planes, f.planes[0])), "planes", "planes"),
    "no planes": (lambda f: replace(f, planes=()), "planes", r"planes \[\]"),
    "a short payload": (lambda f: replace(f, payload=bytes(f.payload)[:-1]), "truncated", "payload has"),
    "no payload": (lambda f: replace(f, payload=b""), "truncated", "payload has 0 bytes"),
    "a long payload": (lambda f: replace(f, payload=bytes(f.payload) + b"\0"), "oversized", "payload has"),
    "a wrong checksum": (lambda f: changed_span(f, 1, checksum=0), "corrupt", "checksum of plane"),
}


PROMPTS = tuple(pages * 32 + 11 for pages in range(4, 8))
"""Prompt lengths in tokens. For every codec, one of them has four pages that travel sealed. Up to three others travel
as exact rows."""


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_each_flaw_is_named_and_final(codec: str, flaw: str) -> None:
    """The third frame of a handoff is spoilt. It is refused for the right reason. After that, neither its honest form
    nor the end is accepted."""
    change, reason, words = FLAWS[flaw]
    shipment = next(
        made for made in (ship(codec, tokens=tokens) for tokens in PROMPTS) if len(made.expected().sent_pages) == 4
    )
    ledger = shipment.ledger()
    for frame in shipment.frames[:2]:
        ledger.accept(frame)
    honest, first = shipment.frames[2], shipment.expected().sent_pages.start
    assert (honest.layer, honest.page_start, honest.page_count) == (0, first + 2, 2)
    with pytest.raises(FrameRefused, match=words.replace("<page>", str(first + 2))) as caught:
        ledger.accept(change(honest))
    assert caught.value.reason in reason.split("|")
    for frame in shipment.frames[2:]:
        with pytest.raises(FrameRefused, match="is over"):
            ledger.accept(frame)
    with pytest.raises(FrameRefused, match="is over"):
        ledger.finish(shipment.end)


def mutate(frame: KvFrame, chance: random.Random) -> KvFrame:
    """Flip a bit, or set another value, in one field or in several."""
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        name = chance.choice([field.name for field in fields(KvFrame) if field.name != "header_bytes"])
        value = getattr(frame, name)
        if name == "planes":
            planes = list(value) or [PlaneSpan("k_codes", 0, 0, 0)]
            index = chance.randrange(len(planes))
            part = chance.choice(["name", "raw_bytes", "coded_bytes", "checksum", "method", "drop", "double", "swap"])
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


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_five_thousand_mutated_frames(codec: str) -> None:
    """The only exception is `FrameRefused`, and only the honest handoff ends well.

    Checksums cover the planes and not the header. So a frame that claims the place of another frame is accepted at
    first. Then the frame whose place it took, or the end, is refused.
    """
    chance = random.Random(codec)
    shipment = ship(codec, layers=2, heads=2, tokens=3 * 32 + 5, step=1)
    reasons, displaced = set(), 0
    ledgers = [shipment.ledger()]
    """The ledger before each frame."""
    for frame in shipment.frames:
        ledgers.append(twin(ledgers[-1]))
        ledgers[-1].check(frame)  # honest, so there is no need to open it
    for _ in range(5000):
        seq = chance.randrange(len(shipment.frames))
        mutant = mutate(shipment.frames[seq], chance)
        if mutant == shipment.frames[seq]:
            continue
        ledger = twin(ledgers[seq])
        try:
            ledger.accept(mutant)
        except FrameRefused as error:
            reasons.add(error.reason)
            continue
        displaced += 1
        with pytest.raises(FrameRefused):
            finish_honestly(shipment, ledger, seq + 1)
    header = {"stale", "duplicate", "order", "range", "planes", "method", "oversized", "truncated"}
    assert reasons == header | {"corrupt"}, "damage is found before a decoder sees it"
    assert displaced < 100


def twin(ledger: FrameLedger) -> FrameLedger:
    """A ledger that has seen the same frames."""
    other = copy(ledger)
    other._missing = ledger._missing.copy()
    return other


def finish_honestly(shipment: Shipment, ledger: FrameLedger, seq: int) -> None:
    for frame in shipment.frames[seq:]:
        ledger.accept(frame)
    ledger.finish(shipment.end)


@pytest.mark.parametrize("name", ["k_sizes", "v_sizes"])
@pytest.mark.parametrize(("first", "last"), [(-1, 0), (0, 32767), (-32768, 32767)])
def test_sizes_that_a_page_cannot_hold_are_refused(name: str, first: int, last: int) -> None:
    """The frames and checksums are right, but their streams end beyond their page, or before they begin."""
    shipment = ship("kvcomp", tokens=64)
    planes = dict(shipment.content[1, 0])
    spoilt = planes[name].clone()
    spoilt[-1, -1, 0], spoilt[-1, -1, -1] = first, last
    (good,) = shipment.writer().frames(0, 0, [shipment.content[0, 0]])
    writer, ledger = shipment.writer(), shipment.ledger()
    list(writer.frames(0, 0, [shipment.content[0, 0]]))
    (bad,) = writer.frames(1, 0, [planes | {name: spoilt}])
    ledger.accept(good)
    with pytest.raises(FrameRefused, match=f"plane {name}, layer 1, frame 1 has sizes below 0, or beyond") as caught:
        ledger.accept(bad)
    assert caught.value.reason == "oversized"
    with pytest.raises(FrameRefused, match="is over"):
        ledger.accept(bad)
