"""Planes of pages <-> frames of bytes. `FrameLedger` (`ledger.py`) says which frames a receiver accepts.

A frame has pages of one layer, or of several in a row: each frame costs both ends some time, however small it is.

Checksums cover the coded bytes of a plane and are seeded with the frame's header: damage is found before a decoder sees
it, and a frame gets the checksums of a later epoch without being decoded. They do not cover the decoded bytes: the wire
form itself guarantees that decoding gives back what was encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import cast

import numpy as np
import torch
import xxhash
from hack_kernels.base import Plane, Planes
from torch import Tensor

from hackkv.device_payload import DevicePayload, lies_on_device
from hackkv.errors import FrameRefused
from hackkv.expected import Expected
from hackkv.types import HandoffEnd, KvFrame, PlaneSpan
from hackkv.wire_form import RAW, Bytes, WireForm

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
        self, layer: int, page_start: int, layers: Sequence[Planes], rows: int = 0, head_start: int = 0
    ) -> Iterator[KvFrame]:
        """Frames for planes [heads, pages, *plane shape] of each layer from `layer` on: in page order, by head too if
        pages are large.

        `head_start` is the first KV head of a sender that holds only some of them.
        """
        heads, pages = next(iter(layers[0].values())).shape[:2]
        head_bytes = sum(map(planes_nbytes, layers)) // (heads * pages)
        head_step = min(heads, max(1, MAX_FRAME_BYTES // head_bytes))
        page_step = max(1, MAX_FRAME_BYTES // (head_bytes * head_step))
        for page in range(0, pages, page_step):
            for head in range(0, heads, head_step):
                at = (slice(head, head + head_step), slice(page, page + page_step))
                part = [{name: plane[at] for name, plane in planes.items()} for planes in layers]
                yield self._frame(layer, head_start + head, page_start + page, part, rows)

    def one(self, layer: int, page_start: int, layers: Sequence[Planes], head_start: int, rows: int = 0) -> KvFrame:
        """A frame of sealed pages, or of `rows` exact rows, that are known to fit into one."""
        return self._frame(layer, head_start, page_start, layers, rows)

    def end(self, first_token: int) -> HandoffEnd:
        """The message that closes the handoff."""
        return handoff_end(self.transfer_id, self._epoch, self._seq, first_token)

    def _frame(self, layer: int, head_start: int, page_start: int, layers: Sequence[Planes], rows: int) -> KvFrame:
        began = perf_counter()
        coded = [_coded(self._form, name, plane) for planes in layers for name, plane in planes.items()]
        heads, pages = next(iter(layers[0].values())).shape[:2]
        place = (layer, len(layers), head_start, heads, page_start, pages, rows)
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
    planes: tuple[tuple[Plane, ...], ...]
    """The frame's planes, by layer."""
    form: WireForm

    @property
    def raw_bytes(self) -> int:
        """Bytes of all planes, decoded."""
        return sum(span.raw_bytes for span in self.frame.planes)

    def open(self) -> tuple[Planes, ...]:
        """Verify and decode each layer's planes, [heads, pages, *plane shape]. Any thread may call. Raises
        `FrameRefused`.

        Planes of a frame for which `device_payload.lies_on_device` holds stay there, all others are in host memory.
        """
        flat = self._flat()
        return tuple({plane.name: self._shaped(plane, next(flat)) for plane in planes} for planes in self.planes)

    def _shaped(self, plane: Plane, flat: Tensor) -> Tensor:
        frame = self.frame
        pages = flat.view(plane.dtype).view(frame.head_count, frame.page_count, *plane.shape)
        if not _sizes_hold(plane, pages):
            where = _where(frame, plane.name)
            raise FrameRefused(f"{where} has sizes below 0, or beyond {plane.most_sum} in a page", "oversized")
        return pages

    def _flat(self) -> Iterator[Tensor]:
        """Each plane's bytes, verified and decoded, in memory of their own: uint8 [raw bytes]."""
        frame = self.frame
        if lies_on_device(frame):
            yield from _verified_on_device(frame)
            return
        for (span, piece), plane in zip(_verified_pieces(frame), chain.from_iterable(self.planes), strict=True):
            flat: Bytes = np.empty(span.raw_bytes, dtype=np.uint8)
            try:
                (self.form if span.method else RAW).decode(piece, flat, plane.dtype.itemsize)
            except ValueError as error:
                raise FrameRefused(f"{_where(frame, span.name)} cannot be decoded: {error}", "undecodable") from error
            yield torch.from_numpy(flat)


def _sizes_hold(plane: Plane, pages: Tensor) -> bool:
    """Whether the numbers of pages [heads, pages, n] are what `Plane.most_sum` allows."""
    if plane.most_sum is None:
        return True
    sizes = pages.cpu().numpy()
    return bool(sizes.min() >= 0 and sizes.sum(-1).max() <= plane.most_sum)


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
    planes = tuple(expected.planes(layer, frame.rows) for layer in frame.layers)
    writer = FrameWriter(frame.transfer_id, frame.epoch, expected.form)
    cut = (slice(None), slice(None), slice(skipped, None)) if exact else (slice(None), slice(skipped, None))
    opened = CheckedFrame(frame, planes, expected.form).open()
    rest = [{name: plane[cut] for name, plane in of_layer.items()} for of_layer in opened]
    first, rows = (frame.page_start, expected.exact_rows) if exact else (expected.held.pages, 0)
    return writer.one(frame.layer, first, rest, frame.head_start, rows)


def planes_nbytes(planes: Planes) -> int:
    """Bytes of all planes."""
    return sum(plane.nbytes for plane in planes.values())


def _coded(form: WireForm, name: str, plane: Tensor) -> tuple[PlaneSpan, bytes | memoryview]:
    """A plane's bytes for the wire, and its header entry without the checksum."""
    raw: Bytes = plane.contiguous().view(torch.uint8).numpy().reshape(-1)
    coded = form.encode(raw, plane.dtype.itemsize, plane.shape)
    if coded is None:
        return PlaneSpan(name, raw.nbytes, raw.nbytes, 0), raw.data
    return PlaneSpan(name, raw.nbytes, len(coded), 0, form.method), coded


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
        raise FrameRefused(f"checksum of {_where(frame, span.name)}", "corrupt")


def _where(frame: KvFrame, plane: str) -> str:
    """A plane of a frame, in an error."""
    return f"plane {plane}, {layers_of(frame)}, frame {frame.seq}"


def layers_of(frame: KvFrame) -> str:
    """The layers of a frame, in an error."""
    last = frame.layer + frame.layer_count - 1
    return f"layer {last}" if last == frame.layer else f"layers {frame.layer} to {last}"


def _seed(frame: KvFrame) -> int:
    """The seed of a frame's checksums: its header."""
    layers, heads = (frame.layer, frame.layer_count), (frame.head_start, frame.head_count)
    place = (*layers, *heads, frame.page_start, frame.page_count, frame.rows)
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
