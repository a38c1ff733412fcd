"""Lends the pages of a prompt that this node holds to the prefill node of the request, as frames.

The request's reservation holds these pages, from `Reserved` until its KV has landed or its call ends. So a lent page
always has a holder. The end of the request also ends the lending: pages are read under the lock that closing a
reservation takes. Each read is one frame. So a fetcher that reads slowly or not at all holds up nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from decode_node.kept_rows import KeptRows
from decode_node.landing import LandingGrant, LandingStrip
from hackkv.codec import planes_bytes
from hackkv.errors import HandshakeRefused
from hackkv.framing import MAX_FRAME_BYTES, FrameWriter
from hackkv.kv_memory import HostKv
from hackkv.model.runner import ModelRunner
from hackkv.page_names import PageName
from hackkv.types import Handoff, HandoffEnd, KvFrame
from hackkv.wire_form import wire_form


@dataclass(slots=True)
class LendCounts:
    """Totals of lent pages and bytes, and refusals."""

    pages: int = 0
    payload_bytes: int = 0
    refused: int = 0


class Lender:
    """Reads held pages on the thread on which frames land, and hands out exact rows."""

    def __init__(self, runner: ModelRunner, strip: LandingStrip, rows: KeptRows) -> None:
        self._strip, self.rows, self._footprint = strip, rows, runner.memory.footprint
        heads = runner.layout.num_kv_heads
        self._at_once = [
            max(1, MAX_FRAME_BYTES // (planes_bytes(planes) * heads)) for planes in runner.codec.wire_planes
        ]
        """The most pages of a frame, by layer."""
        self.counts = LendCounts()

    def check(self, handoff: Handoff, held: Sequence[PageName]) -> HostKv | None:
        """The exact rows that belong to the pages for which `handoff` asks; None if the codec needs none.

        Raises `HandshakeRefused` if it asks for pages that are not in `held`, or the rows are not here.
        """
        end, rest = divmod(handoff.num_tokens, self._footprint.page_tokens)
        exact_rows = self._footprint.exact_rows(handoff.num_tokens)
        there = handoff.held
        if rest or there.exact or not 0 < end <= len(held) or not there.pages < end + (exact_rows > 0):
            asked = f"pages {there.pages} up to {handoff.num_tokens} tokens"
            raise HandshakeRefused(f"{asked} are asked for, but {len(held)} pages are held")
        rows = self.rows.of(held[end - 1]) if exact_rows else None
        if exact_rows and rows is None:
            raise HandshakeRefused(f"the exact rows are not here with which a prompt goes on after page {end - 1}")
        return rows

    async def frames(
        self, handoff: Handoff, grant: LandingGrant, rows: HostKv | None
    ) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Yield the frames that `handoff` asks for, with `rows`. Raises `TransferError` once `grant` is closed."""
        writer = FrameWriter(handoff.transfer_id, handoff.epoch, wire_form(handoff.fingerprint.wire_form))
        end = handoff.num_tokens // self._footprint.page_tokens
        exact_rows = self._footprint.exact_rows(handoff.num_tokens)
        sent = self._footprint.sent_pages(handoff.num_tokens, handoff.held)
        for layer, step in enumerate(self._at_once):
            for first in sent[::step]:
                for frame in await self._strip.lift(grant, layer, range(first, min(sent.stop, first + step)), writer):
                    yield self._counted(frame)
            if rows is not None:
                for frame in await asyncio.to_thread(list, writer.frames(layer, end, [rows.exact[layer]], exact_rows)):
                    yield self._counted(frame)
        self.counts.pages += end - handoff.held.pages
        yield writer.end(0)

    def _counted(self, frame: KvFrame) -> KvFrame:
        self.counts.payload_bytes += len(frame.payload)
        return frame
