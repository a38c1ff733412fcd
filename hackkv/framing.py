"""Planes of pages <-> frames of bytes, and the rules by which a receiver accepts a frame.

A receiver checks all of a frame before it uses any of it. It checks sizes against the layout that both ends agreed on
in the handshake before it allocates memory. `FrameLedger` keeps order and coverage of one handoff.

Checksums cover the coded bytes of a plane and are seeded with the frame's header: damage is found before a decoder sees
it, and a frame gets the checksums of a later epoch without being decoded. They do not cover the decoded bytes: the wire
form itself guarantees that decoding gives back what was encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import cast

import numpy as np
import torch
import xxhash
from hack_kernels.base import Plane
from torch import Tensor

from hackkv.device_payload import DevicePayload, lies_on_device
from hackkv.errors import FrameRefused
from hackkv.expected import Expected
from hackkv.types import HandoffEnd, KvFrame, PlaneSpan
from hackkv.wire_form import RAW, UNCODED, Bytes, WireForm

MAX_FRAME_BYTES = 2 * 2**20
"""Frames are cut so that their payload stays below this (a single page of one KV head may exceed it)."""


class FrameWriter:
    """Cuts the pages of one handoff into numbered frames and codes their planes with `form`."""

    def __init__(self, transfer_id: str, epoch: int, form: WireForm = RAW) -> None:
        self.transfer_id = transfer_id
        self._epoch = epoch
        self._form = form
        self._seq = 0
        self.encode_s = 0.0
        """Seconds spent so far on coding, checksums and putting frames together."""

    def frames(
        self, layer: int, page_start: int, planes: dict[str, Tensor], rows: int = 0, head_start: int = 0
    ) -> Iterator[KvFrame]:
        """Frames for planes [heads, pages, *plane shape] of one layer: in page order, by head too if pages are large.

        `head_start` is the first KV head of a sender that holds only some of them.
        """
        heads, pages = next(iter(planes.values())).shape[:2]
        head_bytes = sum(plane.nbytes for plane in planes.values()) // (heads * pages)
        head_step = min(heads, max(1, MAX_FRAME_BYTES // head_bytes))
        page_step = max(1, MAX_FRAME_BYTES // (head_bytes * head_step))
        for page in range(0, pages, page_step):
            for head in range(0, heads, head_step):
                part = {n: plane[head : head + head_step, page : page + page_step] for n, plane in planes.items()}
                yield self._frame(layer, head_start + head, page_start + page, part, rows)

    def one(self, layer: int, page_start: int, planes: dict[str, Tensor], head_start: int, rows: int = 0) -> KvFrame:
        """A frame of sealed pages, or of `rows` exact rows, that are known to fit into one."""
        return self._frame(layer, head_start, page_start, planes, rows)

    def end(self, first_token: int) -> HandoffEnd:
        """The message that closes the handoff."""
        return handoff_end(self.transfer_id, self._epoch, self._seq, first_token)

    def _frame(self, layer: int, head_start: int, page_start: int, planes: dict[str, Tensor], rows: int) -> KvFrame:
        began = perf_counter()
        coded = [_coded(self._form, name, plane) for name, plane in planes.items()]
        heads, pages = next(iter(planes.values())).shape[:2]
        place = (layer, head_start, heads, page_start, pages, rows)
        frame = KvFrame(
            self.transfer_id,
            self._epoch,
            self._seq,
            *place,
            tuple(span for span, _ in coded),
            b"".join(piece for _, piece in coded),
        )
        seed = _seed(frame)
        spans = tuple(replace(span, checksum=_checksum(piece, seed)) for span, piece in coded)
        self._seq += 1
        self.encode_s += perf_counter() - began
        return replace(frame, planes=spans)


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """A frame whose header is checked and whose payload is not verified yet."""

    frame: KvFrame
    planes: tuple[Plane, ...]
    form: WireForm

    @property
    def raw_bytes(self) -> int:
        """Bytes of all planes, decoded."""
        return sum(span.raw_bytes for span in self.frame.planes)

    def open(self) -> dict[str, Tensor]:
        """Verify and decode the planes, [heads, pages, *plane shape]. Any thread may call. Raises `FrameRefused`.

        Planes of a frame for which `device_payload.lies_on_device` holds stay there, all others are in host memory.
        """
        frame, tensors = self.frame, dict[str, Tensor]()
        for span, flat, plane in zip(frame.planes, self._flat(), self.planes, strict=True):
            tensors[plane.name] = flat.view(plane.dtype).view(frame.head_count, frame.page_count, *plane.shape)
            if not _sizes_hold(plane, tensors[plane.name]):
                where = f"plane {span.name}, layer {frame.layer}, frame {frame.seq}"
                raise FrameRefused(f"{where} has sizes below 0, or beyond {plane.most_sum} in a page", "oversized")
        return tensors

    def _flat(self) -> Iterator[Tensor]:
        """Each plane's bytes, verified and decoded, in memory of their own: uint8 [raw bytes]."""
        frame = self.frame
        if lies_on_device(frame):
            yield from _verified_on_device(frame)
            return
        for (span, piece), plane in zip(_verified_pieces(frame), self.planes, strict=True):
            flat: Bytes = np.empty(span.raw_bytes, dtype=np.uint8)
            try:
                (self.form if span.method else RAW).decode(piece, flat, plane.dtype.itemsize)
            except ValueError as error:
                where = f"plane {span.name}, layer {frame.layer}, frame {frame.seq}"
                raise FrameRefused(f"{where} cannot be decoded: {error}", "undecodable") from error
            yield torch.from_numpy(flat)


def _sizes_hold(plane: Plane, pages: Tensor) -> bool:
    """Whether the numbers of pages [heads, pages, n] are what `Plane.most_sum` allows."""
    if plane.most_sum is None:
        return True
    sizes = pages.cpu().numpy()
    return bool(sizes.min() >= 0 and sizes.sum(-1).max() <= plane.most_sum)


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

    def accept(self, frame: KvFrame) -> dict[str, Tensor]:
        """Check a frame and return its planes [heads, pages, *plane shape]. Raises `FrameRefused` naming the flaw."""
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
        if end.checksum != _digest(end.transfer_id, end.epoch, end.num_frames, end.first_token):
            raise FrameRefused(f"checksum of the end of transfer {self._transfer_id!r}", "corrupt")

    def _check_identity(self, transfer_id: str, epoch: int) -> None:
        if self._over:
            raise FrameRefused(f"transfer {self._transfer_id!r} is over", "order")
        self._over = True  # unless a frame turns out good
        if transfer_id != self._transfer_id:
            raise FrameRefused(f"transfer_id {transfer_id!r} in transfer {self._transfer_id!r}", "stale")
        if epoch != self._epoch:
            raise FrameRefused(f"epoch {epoch} in epoch {self._epoch}", "stale")

    def _cells(self, frame: KvFrame) -> tuple[int, slice, slice]:
        """The part of `_missing` that the frame covers."""
        layers, kv_heads, pages = self._missing.shape
        for what, start, count, limit in (
            ("layer", frame.layer, 1, layers),
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
        heads = slice(frame.head_start, frame.head_start + frame.head_count)
        cells = (frame.layer, heads, slice(frame.page_start, frame.page_start + frame.page_count))
        if not self._missing[cells].all():
            raise FrameRefused(
                f"layer {frame.layer}: a page of {frame.page_start}+{frame.page_count} came twice", "duplicate"
            )
        return cells

    def _planes(self, frame: KvFrame) -> tuple[Plane, ...]:
        expected = self._expected
        planes = expected.planes(frame.layer, frame.rows)
        if tuple(span.name for span in frame.planes) != tuple(plane.name for plane in planes):
            raise FrameRefused(f"planes {[span.name for span in frame.planes]}", "planes")
        for span, plane in zip(frame.planes, planes, strict=True):
            _check_sizes(span, plane.page_bytes * frame.head_count * frame.page_count, expected.form)
        due = sum(span.coded_bytes for span in frame.planes)
        if len(frame.payload) != due:
            reason = "truncated" if len(frame.payload) < due else "oversized"
            raise FrameRefused(f"payload has {len(frame.payload)} bytes where {due} are due", reason)
        return planes


def reissued(frame: KvFrame, epoch: int, seq: int) -> KvFrame:
    """`frame` in another epoch or place: the same bytes, under the checksums that belong to the new header.

    Raises `FrameRefused` when the bytes have changed since they were written: a new checksum must not hide damage.
    """
    if (frame.epoch, frame.seq) == (epoch, seq):
        return frame
    renewed = replace(frame, epoch=epoch, seq=seq)
    seed = _seed(renewed)
    spans = tuple(replace(span, checksum=_checksum(piece, seed)) for span, piece in _verified_pieces(frame))
    return replace(renewed, planes=spans)


def lacked_part(frame: KvFrame, expected: Expected) -> KvFrame | None:
    """The part of `frame`, written for a receiver that has less, that this one lacks; None if it lacks nothing.

    A frame that had to be cut is number 0 of its handoff: `reissued` brings it to its place. Raises `FrameRefused` as
    `CheckedFrame.open` does.
    """
    exact, count = frame.rows > 0, frame.rows or frame.page_count
    skipped = frame.rows - expected.exact_rows if exact else expected.held.pages - frame.page_start
    if skipped <= 0:
        return frame
    if skipped >= count:
        return None
    tensors = CheckedFrame(frame, expected.planes(frame.layer, frame.rows), expected.form).open()
    writer = FrameWriter(frame.transfer_id, frame.epoch, expected.form)
    rest = {name: plane[:, :, skipped:] if exact else plane[:, skipped:] for name, plane in tensors.items()}
    first, rows = (frame.page_start, expected.exact_rows) if exact else (expected.held.pages, 0)
    return writer.one(frame.layer, first, rest, frame.head_start, rows)


def _coded(form: WireForm, name: str, plane: Tensor) -> tuple[PlaneSpan, bytes | memoryview]:
    """A plane's bytes for the wire, and its header entry without the checksum."""
    raw: Bytes = plane.contiguous().view(torch.uint8).numpy().reshape(-1)
    coded = form.encode(raw, plane.dtype.itemsize, plane.shape)
    if coded is None:
        return PlaneSpan(name, raw.nbytes, raw.nbytes, 0), raw.data
    return PlaneSpan(name, raw.nbytes, len(coded), 0, form.method), coded


def _check_sizes(span: PlaneSpan, due: int, form: WireForm) -> None:
    """Check the declared sizes and method of a plane of `due` bytes at rest, before anything is allocated."""
    if span.method not in (UNCODED, form.method):
        raise FrameRefused(f"plane {span.name} is coded by method {span.method}, agreed is {form.name}", "method")
    most = form.cap(due) if span.method else due
    least = 0 if span.method else due
    if span.raw_bytes != due or not least <= span.coded_bytes <= most:
        sizes = f"{span.raw_bytes} raw, {span.coded_bytes} coded"
        raise FrameRefused(f"plane {span.name} declares {sizes} bytes where {due} are due", "oversized")


def _verified_pieces(frame: KvFrame) -> Iterator[tuple[PlaneSpan, memoryview]]:
    """Each plane's part of the payload, after its checksum is verified. Raises `FrameRefused`."""
    payload = memoryview(bytes(frame.payload))
    seed = _seed(frame)
    at = 0
    for span in frame.planes:
        piece = payload[at : at + span.coded_bytes]
        _compare(frame, span, _checksum(piece, seed))
        yield span, piece
        at += span.coded_bytes


def _verified_on_device(frame: KvFrame) -> Iterator[Tensor]:
    """Copies of the verified planes of a frame on a device, uint8 [bytes] there. Raises `FrameRefused`."""
    payload = cast(DevicePayload, frame.payload)
    pieces = payload.pieces([span.coded_bytes for span in frame.planes], _seed(frame))
    for span, (piece, checksum) in zip(frame.planes, pieces, strict=True):
        _compare(frame, span, checksum)
        yield piece


def _compare(frame: KvFrame, span: PlaneSpan, checksum: int) -> None:
    if checksum != span.checksum:
        raise FrameRefused(f"checksum of plane {span.name}, layer {frame.layer}, frame {frame.seq}", "corrupt")


def _seed(frame: KvFrame) -> int:
    """The seed of a frame's checksums: its header."""
    place = (frame.layer, frame.head_start, frame.head_count, frame.page_start, frame.page_count, frame.rows)
    coding = (number for span in frame.planes for number in (span.raw_bytes, span.coded_bytes, span.method))
    return _digest(frame.transfer_id, frame.epoch, frame.seq, *place, *coding)


def _checksum(piece: bytes | memoryview, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(piece, seed)


def handoff_end(transfer_id: str, epoch: int, num_frames: int, first_token: int) -> HandoffEnd:
    """The end of a handoff, with its checksum."""
    fields = (transfer_id, epoch, num_frames, first_token)
    return HandoffEnd(*fields, _digest(*fields))


def _digest(*fields: str | int) -> int:
    """XXH3-64 of header fields. It seeds a frame's checksums, so that right bytes in the wrong place fail too."""
    return xxhash.xxh3_64_intdigest(repr(fields).encode())
