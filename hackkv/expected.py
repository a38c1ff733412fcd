"""The contents of a handoff, on which both ends agree before the first frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hack_kernels.base import Plane

from hackkv.codec import KvCodec
from hackkv.codec_footprint import footprint_of
from hackkv.footprint import Footprint
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.types import KvLayout
from hackkv.wire_form import RAW, WireForm


def open_planes(width: int, rows: int) -> tuple[Plane, ...]:
    """The exact rows of a sequence in a layer, of `width` channels, as planes."""
    return tuple(Plane(name, torch.float16, (rows, width)) for name in ("open_k", "open_v"))


@dataclass(frozen=True, slots=True)
class Expected:
    """The contents of a handoff, as both ends agreed before its first frame."""

    layout: KvLayout
    wire_planes: tuple[tuple[Plane, ...], ...]
    """The planes that travel, by layer."""
    num_rows: int
    """Rows of the sequence, without evicted ones."""
    footprint: Footprint
    form: WireForm = RAW
    """The form in which the sender codes planes. A plane that coding does not shrink comes uncoded."""
    held: HeldKv = NOTHING_HELD
    """Pages that the receiver has already, and that must not come."""

    def planes(self, layer: int, rows: int) -> tuple[Plane, ...]:
        """The planes of a frame of a layer: those of `rows` exact rows, or of sealed pages if `rows` is 0."""
        return open_planes(self.footprint.widths[layer], rows) if rows else self.wire_planes[layer]

    @property
    def sealed(self) -> int:
        """Sealed pages of the sequence, including those that the receiver has already."""
        return self.footprint.sealed(self.num_rows)

    @property
    def sent_pages(self) -> range:
        """The sealed pages that come. The receiver itself seals pages whose rows come exactly."""
        return self.footprint.sent_pages(self.num_rows, self.held)

    @property
    def exact_rows(self) -> int:
        """Rows that travel exactly. They count as one page, which follows the sealed ones."""
        return self.footprint.exact_rows(self.num_rows, self.held.exact)


def expected_of(codec: KvCodec, layout: KvLayout, rows: int, form: WireForm, held: HeldKv) -> Expected:
    """The contents of a handoff of `rows` rows in this form to a receiver that has `held`."""
    return Expected(layout, codec.wire_planes, rows, footprint_of(codec, layout), form, held)
