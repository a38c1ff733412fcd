"""Planes of pages <-> frames of bytes, and the rules by which a receiver believes a frame.

Nothing of a frame is used before all of it was checked, and no memory is allocated before its sizes were checked
against the layout that both ends agreed on in the handshake. `FrameLedger` holds order and coverage of one handoff.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
import torch
import xxhash
from torch import Tensor

from hackkv.codec import FP16_BYTES, PageFormat, Plane
from hackkv.errors import FrameRefused
from hackkv.types import HandoffEnd, KvFrame, KvLayout, PlaneSpan

MAX_FRAME_BYTES = 2 * 2**20
"""Frames are cut so that their payload stays below this (a single page of one KV head may exceed it)."""


def open_planes(head_dim: int, rows: int) -> tuple[Plane, ...]:
    """The FP16 rows of an open page, as planes."""
    return tuple(Plane(name, torch.float16, (rows, head_dim)) for name in ("open_k", "open_v"))


class FrameWriter:
    """Cuts the pages of one handoff into numbered frames."""

    def __init__(self, transfer_id: str, epoch: int) -> None:
        self._transfer_id = transfer_id
        self._epoch = epoch
        self._seq = 0

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

    def end(self, first_token: int) -> HandoffEnd:
        """Close the handoff."""
        return handoff_end(self._transfer_id, self._epoch, self._seq, first_token)

    def _frame(self, layer: int, head_start: int, page_start: int, planes: dict[str, Tensor], rows: int) -> KvFrame:
        pieces = [plane.contiguous().view(torch.uint8).numpy().reshape(-1).data for plane in planes.values()]
        heads, pages = next(iter(planes.values())).shape[:2]
        place = (layer, head_start, heads, page_start, pages, rows)
        seed = _digest(self._transfer_id, self._epoch, self._seq, *place)
        spans = tuple(
            PlaneSpan(name, piece.nbytes, piece.nbytes, xxhash.xxh3_64_intdigest(piece, seed))
            for name, piece in zip(planes, pieces, strict=True)
        )
        seq, self._seq = self._seq, self._seq + 1
        return KvFrame(self._transfer_id, self._epoch, seq, *place, spans, b"".join(pieces))


class FrameLedger:
    """Believes or refuses the frames of one handoff; everything must arrive exactly once and in order.

    `sealed` is how many pages of the sequence travel as planes; the rows past them travel as one open page. Nothing is
    believed after a refusal or after the end.
    """

    def __init__(
        self, layout: KvLayout, page_format: PageFormat, transfer_id: str, epoch: int, num_tokens: int, sealed: int
    ) -> None:
        self._layout = layout
        self._format = page_format
        self._transfer_id = transfer_id
        self._epoch = epoch
        self._sealed = sealed
        self._rows = max(0, num_tokens - sealed * layout.page_tokens)
        self._seq = 0
        self._over = False
        self._missing = np.ones((layout.num_layers, layout.num_kv_heads, sealed + (self._rows > 0)), dtype=np.bool_)

    def accept(self, frame: KvFrame) -> dict[str, Tensor]:
        """Check a frame and return its planes [heads, pages, *plane shape]. Raises `FrameRefused` naming the flaw."""
        self._check_identity(frame.transfer_id, frame.epoch)
        if frame.seq != self._seq:
            reason = "duplicate" if frame.seq < self._seq else "order"
            raise FrameRefused(f"frame {frame.seq} arrived where {self._seq} was due", reason)
        cells = self._cells(frame)
        planes = self._planes(frame)
        tensors = _verify(frame, planes)
        self._missing[cells] = False
        self._seq += 1
        self._over = False
        return tensors

    def finish(self, end: HandoffEnd) -> None:
        """Check that nothing is missing and that the end is what was sent. Raises `FrameRefused`."""
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
        is_open = frame.page_start + frame.page_count > self._sealed
        if frame.rows != (self._rows if is_open else 0) or (is_open and frame.page_count != 1):
            raise FrameRefused(f"{frame.rows} rows for pages {frame.page_start}+{frame.page_count}", "range")
        heads = slice(frame.head_start, frame.head_start + frame.head_count)
        cells = (frame.layer, heads, slice(frame.page_start, frame.page_start + frame.page_count))
        if not self._missing[cells].all():
            raise FrameRefused(
                f"layer {frame.layer}: a page of {frame.page_start}+{frame.page_count} came twice", "duplicate"
            )
        return cells

    def _planes(self, frame: KvFrame) -> tuple[Plane, ...]:
        planes = open_planes(self._layout.head_dim, frame.rows) if frame.rows else self._format.wire_planes
        if tuple(span.name for span in frame.planes) != tuple(plane.name for plane in planes):
            raise FrameRefused(f"planes {[span.name for span in frame.planes]}", "planes")
        per_plane = frame.head_count * frame.page_count
        for span, plane in zip(frame.planes, planes, strict=True):
            due = plane.page_bytes * per_plane
            if span.raw_bytes != due or span.coded_bytes != due:
                sizes = f"{span.raw_bytes} raw, {span.coded_bytes} coded"
                raise FrameRefused(f"plane {plane.name} declares {sizes} bytes where {due} are due", "oversized")
        due = sum(span.coded_bytes for span in frame.planes)
        if len(frame.payload) != due:
            reason = "truncated" if len(frame.payload) < due else "oversized"
            raise FrameRefused(f"payload has {len(frame.payload)} bytes where {due} are due", reason)
        return planes


def reissued(frame: KvFrame, epoch: int) -> KvFrame:
    """`frame` in another epoch: the same bytes, under the checksums that belong to the new header.

    Raises `FrameRefused` when the bytes are no longer those that were written: a new checksum must not bless damage.
    """
    renewed = replace(frame, epoch=epoch)
    seed = _seed(renewed)
    spans = tuple(
        replace(span, checksum=xxhash.xxh3_64_intdigest(piece, seed)) for span, piece in _verified_pieces(frame)
    )
    return replace(renewed, planes=spans)


def _verify(frame: KvFrame, planes: tuple[Plane, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for (_, piece), plane in zip(_verified_pieces(frame), planes, strict=True):
        # bytearray: torch wants writable memory; the copy also frees the payload with the frame.
        flat = torch.frombuffer(bytearray(piece), dtype=plane.dtype)
        tensors[plane.name] = flat.view(frame.head_count, frame.page_count, *plane.shape)
    return tensors


def _verified_pieces(frame: KvFrame) -> Iterator[tuple[PlaneSpan, memoryview]]:
    """Each plane's part of the payload, once its checksum was found right. Raises `FrameRefused`."""
    payload = memoryview(frame.payload)
    seed = _seed(frame)
    at = 0
    for span in frame.planes:
        piece = payload[at : at + span.coded_bytes]
        if xxhash.xxh3_64_intdigest(piece, seed) != span.checksum:
            raise FrameRefused(f"checksum of plane {span.name}, layer {frame.layer}, frame {frame.seq}", "corrupt")
        yield span, piece
        at += span.coded_bytes


def _seed(frame: KvFrame) -> int:
    """The seed of a frame's checksums: its header."""
    place = (frame.layer, frame.head_start, frame.head_count, frame.page_start, frame.page_count, frame.rows)
    return _digest(frame.transfer_id, frame.epoch, frame.seq, *place)


def handoff_end(transfer_id: str, epoch: int, num_frames: int, first_token: int) -> HandoffEnd:
    """The end of a handoff, with its checksum."""
    fields = (transfer_id, epoch, num_frames, first_token)
    return HandoffEnd(*fields, _digest(*fields))


def _digest(*fields: str | int) -> int:
    """XXH3-64 of header fields. As the seed of a frame's checksums it makes right bytes in the wrong place fail too."""
    return xxhash.xxh3_64_intdigest(repr(fields).encode())


def fp16_bytes(layout: KvLayout, tokens: int) -> int:
    """What `tokens` tokens of this layout weigh uncompressed."""
    return prod((2, FP16_BYTES, layout.num_layers, layout.num_kv_heads, layout.head_dim, tokens))
