"""The size of a sequence, in pages and in bytes, over all layers and KV heads of a node. Numbers only, no tensors.

Schedulers decide by it, so it loads no tensor library: `hackkv.codec_footprint` asks codecs for their sizes.

Everything here is a function of *rows*: what the cache holds. A codec that evicts rows after prefill holds fewer rows
than tokens; `hackkv.codec.rows_held` says how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hackkv.held import NOTHING_HELD, HeldKv

if TYPE_CHECKING:
    from hack_kernels.window import Window


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one model's KV under one codec."""

    page_tokens: int
    page_bytes: int
    """One sealed page of all layers and KV heads, at rest."""
    wire_page_bytes: int
    """One sealed page of all layers and KV heads on the wire, before coding."""
    row_bytes: int
    """One row of K and V of all layers and KV heads in a slot: FP16."""
    window: Window
    """The rows that lie in the slot."""
    seals_open_page: bool = False
    """Whether rows past the last full page rest as a sealed page too."""
    noted_bytes: int = 0
    """Notes of one page of all layers and KV heads, on a node that computes prompts (`Eviction.notes`)."""
    widths: tuple[int, ...] = ()
    """Channels of a row in a slot, by layer: fewer than the model's where a codec projects."""

    def pages(self, rows: int) -> int:
        """Pages that `rows` rows take, the open page included."""
        return -(-rows // self.page_tokens)

    def sealed(self, rows: int) -> int:
        """The number of pages of `rows` rows that rest as planes."""
        return self.pages(rows) if self.seals_open_page else rows // self.page_tokens

    def sent_pages(self, rows: int, held: HeldKv = NOTHING_HELD) -> range:
        """The sealed pages that travel to a receiver with `held`, which itself seals pages whose rows come exactly."""
        sealed = self.sealed(rows)
        coded = range(sealed) if self.seals_open_page else self.window.coded(sealed)
        return range(max(coded.start, held.pages), max(coded.stop, held.pages))

    def exact_pages(self, rows: int, first: int = 0) -> tuple[int, ...]:
        """The full pages from number `first` on whose rows lie in the slot."""
        exact = () if self.seals_open_page else self.window.earlier(rows // self.page_tokens)
        return tuple(page for page in exact if page >= first)

    def exact_rows(self, rows: int, first: int = 0) -> int:
        """The number of rows in the slot, in FP16: those of the open page, of sinks and of recent pages. Pages before
        number `first` do not count."""
        return 0 if self.seals_open_page else self.window.exact_rows(rows, self.page_tokens, first)

    def runs(self, rows: int, first: int = 0) -> tuple[slice, ...]:
        """The places of these rows in the slot; see `Window.runs`."""
        return () if self.seals_open_page else self.window.runs(rows, self.page_tokens, first)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, over all layers and KV heads."""
        return self.window.pages * self.page_tokens * self.row_bytes

    @property
    def earlier_bytes(self) -> int:
        """The most bytes that a slot of all layers and KV heads holds beside the open page."""
        return self.slot_bytes - self.page_tokens * self.row_bytes

    def resting_bytes(self, rows: int) -> int:
        """Bytes of sealed pages and exact rows, at rest."""
        return self.sealed(rows) * self.page_bytes + self.exact_rows(rows) * self.row_bytes

    def wire_bytes(self, rows: int, held: HeldKv = NOTHING_HELD) -> int:
        """Payload bytes of a handoff to a receiver that has `held`, before coding."""
        pages = len(self.sent_pages(rows, held))
        return pages * self.wire_page_bytes + self.exact_rows(rows, held.exact) * self.row_bytes

    def most_bytes(self, rows: int) -> int:
        """The largest size at rest of a sequence while it grows to `rows` rows."""
        return self.sealed(rows) * self.page_bytes + self.slot_bytes
