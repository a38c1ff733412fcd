"""The KV that leaves a prefill node during one pass: what a layer has sealed leaves while later layers are computed.

Frames take time at both ends, so pages of layers in a row leave in one frame while they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hack_kernels.base import Planes

from hackkv.codec import KvCodec, rows_held
from hackkv.framing import MAX_FRAME_BYTES, planes_nbytes
from hackkv.kv_memory import KvMemory
from hackkv.lanes import Departures
from hackkv.types import HandoffEnd, KvFrame
from prefill_node.scheduler import Chunk
from prefill_node.work import Work

Emit = Callable[[Work, KvFrame | HandoffEnd], None]
"""Takes a frame of a job; called from the engine's thread."""

GATHERED_PLANES: Final = 256
"""The most planes of a frame, less than receivers accept (`transport.coder.MAX_PLANES`)."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Pages of a prompt, or its exact rows, of layers in a row: the next frame."""

    layer: int
    first: int
    """The number of the first page."""
    rows: int
    layers: list[Planes] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(map(planes_nbytes, self.layers))

    def takes(self, layer: int, first: int, rows: int, planes: Planes) -> bool:
        """Whether a layer's planes fit in the same frame."""
        follows = (layer, first, rows) == (self.layer + len(self.layers), self.first, self.rows)
        num_planes = sum(map(len, self.layers)) + len(planes)
        fits = num_planes <= GATHERED_PLANES and self.num_bytes + planes_nbytes(planes) <= MAX_FRAME_BYTES
        return follows and fits and _pages(planes) == _pages(self.layers[0])


class OutgoingKv:
    """What leaves during one pass, by way of `departures`. When these have ended, `send_rest` must follow. If the pass
    fails instead, the rest does not leave: a later pass ships it again."""

    def __init__(self, memory: KvMemory, codec: KvCodec, emit: Emit, frame_bytes: int, departures: Departures) -> None:
        """`frame_bytes`: see `PrefillSettings`."""
        self._memory, self._codec, self._emit, self._frame_bytes = memory, codec, emit, frame_bytes
        self._departures = departures
        self._gathered: dict[tuple[Work, bool], _Gathered] = {}
        """By job, sealed pages and exact rows apart."""
        self.encode_s = 0.0
        """Seconds spent on frames so far."""

    def send_rest(self) -> None:
        """Send the pages and rows that were not enough for a frame."""
        for work, exact in tuple(self._gathered):
            self._send(work, exact)

    def ship(self, layer: int, chunk: Chunk[Work], rows: int) -> None:
        """Ship the sealed pages of a prompt's first `rows` rows that have not left. With the last chunk, also ship the
        exact rows. A page travels either sealed or as exact rows."""
        work, memory = chunk.prompt.owner, self._memory
        if not work.job.handoff:
            return
        sizes, held = memory.footprint, work.job.held
        due = sizes.sent_pages(rows_held(self._codec, chunk.prompt.num_tokens), held)
        first, sealed = work.sent_pages.get(layer, due.start), sizes.sealed(rows)
        last = min(sealed, due.stop)
        if last > first:
            parts = memory.export(layer, chunk.grant.pages[first:last])
            self._departures.send(parts, lambda part, planes: self._gather(work, layer, first + part.first, planes))
        exact_rows = sizes.exact_rows(rows, held.exact)
        if chunk.is_last and exact_rows and first <= sealed:
            leaving = memory.export_rows(layer, chunk.grant.slot, rows, held.exact)
            self._departures.send(
                iter((leaving,)), lambda _, planes: self._gather(work, layer, sealed, planes, exact_rows)
            )

    def _gather(self, work: Work, layer: int, first: int, planes: Planes, exact_rows: int = 0) -> None:
        """Take a layer's pages from number `first` on, or the exact rows after them. Send them if they are enough."""
        kind = (work, exact_rows > 0)
        gathered = self._gathered.get(kind)
        if gathered is not None and not gathered.takes(layer, first, exact_rows, planes):
            self._send(*kind)
            gathered = None
        if gathered is None:
            gathered = self._gathered[kind] = _Gathered(layer, first, exact_rows)
        enough = gathered.num_bytes + planes_nbytes(planes) >= self._frame_bytes
        # Planes that come through a ring are overwritten there.
        stay = enough or self._memory.lanes.inline
        gathered.layers.append(planes if stay else {name: plane.clone() for name, plane in planes.items()})
        if enough:
            self._send(*kind)

    def _send(self, work: Work, exact: bool) -> None:
        gathered = self._gathered.pop((work, exact))
        before = work.writer.encode_s
        for frame in work.writer.frames(gathered.layer, gathered.first, gathered.layers, gathered.rows):
            self._emit(work, frame)
        self.encode_s += work.writer.encode_s - before
        end = gathered.first + _pages(gathered.layers[0])
        for layer in range(gathered.layer, gathered.layer + len(gathered.layers)):
            work.sent_pages[layer] = max(end, work.sent_pages.get(layer, 0))


def _pages(planes: Planes) -> int:
    return next(iter(planes.values())).shape[1]
