"""The rules by which a receiver accepts a frame.

A receiver checks all of a frame before it uses any of it. It checks sizes against the layout that both ends agreed on
in the handshake before it allocates memory. `FrameLedger` keeps order and coverage of one handoff.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from hack_kernels.base import Plane, Planes

from hackkv.errors import FrameRefused
from hackkv.expected import Expected
from hackkv.framing import CheckedFrame, handoff_end, layers_of
from hackkv.types import HandoffEnd, KvFrame, PlaneSpan
from hackkv.wire_form import UNCODED, WireForm


class FrameLedger:
    """Accepts or refuses the frames of one handoff; everything must arrive exactly once and in order.

    It accepts nothing after a refusal or after the end.
    """

    def __init__(self, transfer_id: str, epoch: int, expected: Expected) -> None:
        self._transfer_id = transfer_id
        self._epoch = epoch
        self._expected = expected
        self._seq = 0
        self._over = False
        pages, sent = expected.sealed + (expected.exact_rows > 0), expected.sent_pages
        self._missing = np.ones((expected.layout.num_layers, expected.layout.num_kv_heads, pages), dtype=np.bool_)
        self._missing[:, :, : sent.start] = False
        self._missing[:, :, sent.stop : expected.sealed] = False

    def accept(self, frame: KvFrame) -> tuple[Planes, ...]:
        """Check a frame and return each layer's planes [heads, pages, *plane shape]. Raises `FrameRefused` naming the
        flaw."""
        checked = self.check(frame)
        self._over = True
        tensors = checked.open()
        self._over = False
        return tensors

    def check(self, frame: KvFrame) -> CheckedFrame:
        """Check a frame's header and count the frame as arrived. Raises `FrameRefused` naming the flaw.

        If opening the returned frame raises, the caller must not use the ledger any further.
        """
        self._check_identity(frame.transfer_id, frame.epoch)
        if frame.seq != self._seq:
            reason = "duplicate" if frame.seq < self._seq else "order"
            raise FrameRefused(f"frame {frame.seq} arrived where {self._seq} was due", reason)
        cells = self._cells(frame)
        planes = self._planes(frame)
        self._missing[cells] = False
        self._seq += 1
        self._over = False
        return CheckedFrame(frame, planes, self._expected.form)

    def finish(self, end: HandoffEnd) -> None:
        """Check that all pages arrived and that the end message is intact. Raises `FrameRefused`."""
        self._check_identity(end.transfer_id, end.epoch)
        if end.num_frames != self._seq:
            raise FrameRefused(f"the sender counts {end.num_frames} frames, {self._seq} arrived", "truncated")
        if self._missing.any():
            layer, head, page = np.argwhere(self._missing)[0]
            missing = f"{self._missing.sum()} pages never arrived"
            raise FrameRefused(f"{missing}, the first is layer {layer}, KV head {head}, page {page}", "truncated")
        if end != handoff_end(end.transfer_id, end.epoch, end.num_frames, end.first_token):
            raise FrameRefused(f"checksum of the end of transfer {self._transfer_id!r}", "corrupt")

    def _check_identity(self, transfer_id: str, epoch: int) -> None:
        if self._over:
            raise FrameRefused(f"transfer {self._transfer_id!r} is over", "order")
        self._over = True  # unless a frame turns out good
        if transfer_id != self._transfer_id:
            raise FrameRefused(f"transfer_id {transfer_id!r} in transfer {self._transfer_id!r}", "stale")
        if epoch != self._epoch:
            raise FrameRefused(f"epoch {epoch} in epoch {self._epoch}", "stale")

    def _cells(self, frame: KvFrame) -> tuple[slice, slice, slice]:
        """The part of `_missing` that the frame covers."""
        layers, kv_heads, pages = self._missing.shape
        for what, start, count, limit in (
            ("layer", frame.layer, frame.layer_count, layers),
            ("KV head", frame.head_start, frame.head_count, kv_heads),
            ("page", frame.page_start, frame.page_count, pages),
        ):
            if start < 0 or count < 1 or start + count > limit:
                raise FrameRefused(f"{what} range {start}+{count} does not lie in {limit}", "range")
        if frame.page_start < self._expected.held.pages:
            raise FrameRefused(f"page {frame.page_start}: the first {self._expected.held.pages} are here", "range")
        is_open, sent = frame.page_start + frame.page_count > self._expected.sealed, self._expected.sent_pages
        if not is_open and not sent.start <= frame.page_start <= frame.page_start + frame.page_count <= sent.stop:
            raise FrameRefused(f"pages {frame.page_start}+{frame.page_count}: some come as exact rows", "range")
        if frame.rows != (self._expected.exact_rows if is_open else 0) or (is_open and frame.page_count != 1):
            raise FrameRefused(f"{frame.rows} rows for pages {frame.page_start}+{frame.page_count}", "range")
        cells = (
            slice(frame.layer, frame.layer + frame.layer_count),
            slice(frame.head_start, frame.head_start + frame.head_count),
            slice(frame.page_start, frame.page_start + frame.page_count),
        )
        if not self._missing[cells].all():
            where = layers_of(frame)
            raise FrameRefused(f"{where}: a page of {frame.page_start}+{frame.page_count} came twice", "duplicate")
        return cells

    def _planes(self, frame: KvFrame) -> tuple[tuple[Plane, ...], ...]:
        expected = self._expected
        planes = tuple(expected.planes(layer, frame.rows) for layer in frame.layers)
        due = tuple(chain.from_iterable(planes))
        if tuple(span.name for span in frame.planes) != tuple(plane.name for plane in due):
            raise FrameRefused(f"planes {[span.name for span in frame.planes]}", "planes")
        for span, plane in zip(frame.planes, due, strict=True):
            _check_sizes(span, plane.page_bytes * frame.head_count * frame.page_count, expected.form)
        size = sum(span.coded_bytes for span in frame.planes)
        if len(frame.payload) != size:
            reason = "truncated" if len(frame.payload) < size else "oversized"
            raise FrameRefused(f"payload has {len(frame.payload)} bytes where {size} are due", reason)
        return planes


def _check_sizes(span: PlaneSpan, due: int, form: WireForm) -> None:
    """Check the declared sizes and method of a plane of `due` bytes at rest, before anything is allocated."""
    if span.method not in (UNCODED, form.method):
        raise FrameRefused(f"plane {span.name} is coded by method {span.method}, agreed is {form.name}", "method")
    most = form.cap(due) if span.method else due
    least = 0 if span.method else due
    if span.raw_bytes != due or not least <= span.coded_bytes <= most:
        sizes = f"{span.raw_bytes} raw, {span.coded_bytes} coded"
        raise FrameRefused(f"plane {span.name} declares {sizes} bytes where {due} are due", "oversized")
