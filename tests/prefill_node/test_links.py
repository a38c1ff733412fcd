"""Links are measured by the pushes that pass them, and frames for a slow link are coded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hackkv.errors import HackkvError, NodeLost
from hackkv.model.generate import generate
from hackkv.types import (
    DecodeJob,
    Fingerprint,
    HandedOff,
    Handoff,
    HandoffEnd,
    KvFrame,
    Prefilled,
    PrefillJob,
    Receipt,
    Reserved,
    Token,
)
from hackkv.wire_choice import CODER
from hackkv.wire_form import RAW, wire_form
from prefill_node.links import ENOUGH_BYTES, Links
from tests.pair import PI, greedy, paired, prompt, tiny_worker
from transport.base import KvPusher
from transport.closing import closing

ADDRESS = "inproc://slow"
HANDOFF = Handoff("t", 0, Fingerprint(()), 1)


class Paced:
    """A wire that advances a clock by fixed seconds per byte, and by `commit_s` until the receiver has committed."""

    def __init__(self, seconds_per_byte: float, commit_s: float, error: HackkvError | None = None) -> None:
        self.now = 0.0
        self._seconds_per_byte, self._commit_s, self._error = seconds_per_byte, commit_s, error

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        async for item in frames:
            self.now += len(item.payload) * self._seconds_per_byte if isinstance(item, KvFrame) else self._commit_s
        if self._error is not None:
            raise self._error
        return Receipt(handoff.transfer_id, 1, (), 0, 0, 0.0)

    async def close(self) -> None:
        pass


async def items(wire: Paced, num_bytes: int) -> AsyncIterator[KvFrame | HandoffEnd]:
    """Four frames that take long to be ready, and the end."""
    for seq in range(4):
        wire.now += 100.0
        yield KvFrame("t", 0, seq, 0, 1, 0, 1, seq, 1, 0, (), bytes(num_bytes // 4))
    yield HandoffEnd("t", 0, 4, 7, 0)


def links_over(wire: Paced) -> Links:
    sender: KvPusher = wire
    return Links(sender, wire_form(CODER), True, lambda: wire.now)


async def test_a_rate_is_bytes_by_the_time_that_the_link_took() -> None:
    wire = Paced(1e-6, 0.25)
    links = links_over(wire)
    await links.push(ADDRESS, HANDOFF, items(wire, ENOUGH_BYTES))
    assert links.rates[ADDRESS].seconds_per_unit == pytest.approx(1e-6 + 0.25 / ENOUGH_BYTES)
    assert not links.rates["inproc://other"].known


async def test_small_pushes_and_failed_ones_measure_nothing() -> None:
    wire = Paced(1e-6, 0.25)
    links = links_over(wire)
    await links.push(ADDRESS, HANDOFF, items(wire, ENOUGH_BYTES // 2))
    assert not links.rates[ADDRESS].known
    wire = Paced(1e-6, 0.25, NodeLost("gone"))
    links = links_over(wire)
    with pytest.raises(NodeLost):
        await links.push(ADDRESS, HANDOFF, items(wire, ENOUGH_BYTES))
    assert not links.rates[ADDRESS].known


async def test_a_prompt_for_a_slow_link_travels_in_fewer_bytes_and_decodes_to_the_same() -> None:
    """The other link is faster than any coder. There only the frames that measure the coder are coded."""
    worker = tiny_worker("fp16", wire_form="auto")
    tokens = 16 * PI
    request, sent = greedy("r", prompt(1, tokens), 4), list[int]()
    for seconds_per_byte in (0.0, 1e3):
        async with paired(worker) as nodes:
            nodes.prefill.outbox.links.rates[nodes.address].add(1.0, seconds_per_byte)
            async with closing(nodes.decode.decode(DecodeJob(request, "r", 0))) as decoding:
                assert await anext(decoding) == Reserved()
                async with closing(nodes.prefill.prefill(PrefillJob(request, "r", 0, nodes.address))) as events:
                    prefilled, handed_off = await anext(events), await anext(events)
                    found = [event async for event in decoding if isinstance(event, Token)]
        assert isinstance(prefilled, Prefilled)
        assert isinstance(handed_off, HandedOff)
        sent.append(sum(size for _, size in handed_off.receipt.bytes_by_plane))
        assert prefilled.wire_encode_s > 0
        assert handed_off.receipt.wire_decode_s > 0
        assert [prefilled.token, *found] == generate(worker, request)
    fast, slow = sent
    assert slow < fast <= worker.footprint.wire_bytes(tokens)


def test_a_codec_says_whether_its_frames_are_always_coded() -> None:
    """The form is named in the handshake, so a receiver knows it before the first frame."""
    assert tiny_worker("hack", wire_form="auto").codec.codes_where_it_pays
    assert not tiny_worker("hack", wire_form="zstd").codec.codes_where_it_pays
    auto, zstd = (tiny_worker("hack", wire_form=name) for name in ("auto", "zstd"))
    assert auto.fingerprint == zstd.fingerprint


async def test_pages_are_fetched_in_the_form_in_which_pushes_to_the_same_node_leave() -> None:
    wire = Paced(1e-3, 0.25)
    links, always = links_over(wire), Links(wire, wire_form(CODER))
    assert (links.fetch_form(ADDRESS).name, always.fetch_form(ADDRESS).name) == (RAW.name, CODER)
    await links.push(ADDRESS, HANDOFF, items(wire, ENOUGH_BYTES))
    assert (links.fetch_form(ADDRESS).name, links.fetch_form("other").name) == (CODER, RAW.name)
