"""The KV of one node: every layer's pool on its device, and every way in and out of it.

Pages go to the wire in wire order (`export`) and come from it (`install`), by layer and range of KV heads. They go to
host memory and back in their resting order, so nothing is converted or rounded (`copy_out`, `copy_back`, `HostPages`).
Schedulers decide who may touch which page. The methods here touch only the pages that they are given; any thread may
call them for pages that nobody else uses. Outgoing planes are complete when their `Leaving` says so. Incoming ones are
written at the end of `lanes.arriving`. Whoever frees pages, or reports them, waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from hack_kernels.base import Planes, Pool
from hack_kernels.pools import forget
from torch import Tensor

from hackkv.batch import Fills
from hackkv.codec import KvCodec
from hackkv.codec_footprint import footprint_of
from hackkv.device_payload import lies_on_device
from hackkv.footprint import Footprint
from hackkv.lanes import Leaving, lanes_on
from hackkv.types import KvFrame, KvLayout

OPEN_PLANES = ("open_k", "open_v")
"""Names of the planes in which the exact rows of a sequence travel, [Hkv, 1, rows, D] float16."""


@dataclass(frozen=True, slots=True)
class HostKv:
    """The KV of one sequence in host memory, all of it by layer."""

    sealed: tuple[tuple[Planes, ...], ...]
    """The sequence's pages, in parts, in their resting order [pages, Hkv, ...]."""
    exact: tuple[Planes, ...]
    """The sequence's exact rows, as planes `OPEN_PLANES`."""
    pages: int
    rows: int
    """Rows that the sequence holds."""


class KvMemory:
    """All pools of a node, made by the codec's kernels on their device."""

    def __init__(
        self, codec: KvCodec, layout: KvLayout, num_pages: int, num_slots: int, *, prompts: bool = True
    ) -> None:
        """`prompts` says whether whole prompts are computed here."""
        self.footprint: Footprint = footprint_of(codec, layout)
        self._heads = range(layout.num_kv_heads)
        self.pools: tuple[Pool, ...] = codec.new_pools(num_pages, num_slots, self._heads, prompts=prompts)
        self._codec = codec
        page = max(fmt.page_bytes for fmt in codec.formats) * layout.num_kv_heads
        rows = max(pool.open_k[:1].nbytes + pool.open_v[:1].nbytes for pool in self.pools)
        self.lanes = lanes_on(self.pools[0].device, 2 * max(page, rows))

    def export(self, layer: int, pages: Sequence[int]) -> Iterator[Leaving]:
        """Sealed pages as planes that travel: name -> [Hkv, P, *plane shape], contiguous; in order, part by part."""
        pool = self.pools[layer]
        sizes = [plane.page_bytes * len(self._heads) for plane in self._codec.wire_planes[layer]]
        parts = self.lanes.pieces(len(pages), sizes)
        return self._fetched(_ids(pages), parts, lambda ids: self._codec.to_wire(layer, pool, ids))

    def export_rows(self, layer: int, slot: int, rows: int, first: int = 0) -> Leaving:
        """The exact rows of a sequence that holds `rows` rows, page after page from number `first` on, as planes
        `open_k` and `open_v` [Hkv, 1, exact rows, D]."""
        pool = self.pools[layer]
        exact = dict(zip(OPEN_PLANES, (pool.open_k, pool.open_v), strict=True))
        return self.lanes.fetch(
            _ids(()), lambda _: {name: self._read(slots[slot], rows, first)[:, None] for name, slots in exact.items()}
        )

    def install(
        self, layer: int, heads: range, pages: Sequence[int], planes: Planes, *, resident: bool = False
    ) -> None:
        """Write one part of what `export` of an equal codec gave, for some of the KV heads, bit-exact. `resident`
        planes lie on the device already."""
        pool = self.pools[layer].heads(heads.start, len(heads))

        def write(ids: Tensor, here: Planes) -> None:
            self._codec.from_wire(layer, pool, ids, here)

        self.lanes.bring(_ids(pages), planes, write, resident=resident)

    def install_rows(
        self, layer: int, heads: range, slot: int, runs: Sequence[slice], planes: Planes, *, resident: bool = False
    ) -> None:
        """Write the planes that `export_rows` gave for these runs (`Footprint.runs`), for some of the KV heads."""
        pool = self.pools[layer].heads(heads.start, len(heads))

        def write(_: Tensor, here: Planes) -> None:
            for name, exact in zip(OPEN_PLANES, (pool.open_k, pool.open_v), strict=True):
                _write(exact[slot], runs, here[name][:, 0])

        self.lanes.bring(_ids(()), planes, write, resident=resident)

    def seal_rows(self, layer: int, pages: Sequence[int], slot: int, rows: int, first: int) -> None:
        """Seal the pages from number `first` on whose rows came exactly and which therefore did not come sealed.
        `pages` are those of a sequence of `rows` rows. The bytes are those that any other node has."""
        numbers = self.footprint.exact_pages(rows, first)
        if not numbers:
            return
        pool, page_tokens = self.pools[layer], self.footprint.page_tokens
        where = {
            "starts": _ids([number * page_tokens for number in numbers]),
            "slots": _ids([slot for _ in numbers]),
        }

        def seal(ids: Tensor, here: Planes) -> None:
            self._codec.seal_held(layer, pool, Fills(ids, here["starts"], here["slots"]))

        self.lanes.bring(_ids([pages[number] for number in numbers]), where, seal)

    def install_frame(
        self, frame: KvFrame, layers: Sequence[Planes], pages: Sequence[int], slot: int, runs: Sequence[slice]
    ) -> None:
        """Write each layer's planes of a frame to the pages that a sequence holds, or its exact rows to these runs of
        `slot`."""
        heads = range(frame.head_start, frame.head_start + frame.head_count)
        due, resident = pages[frame.page_start : frame.page_start + frame.page_count], lies_on_device(frame)
        for layer, planes in zip(frame.layers, layers, strict=True):
            if frame.rows:
                self.install_rows(layer, heads, slot, runs, planes, resident=resident)
            else:
                self.install(layer, heads, due, planes, resident=resident)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the exact rows of a sequence that holds `rows` rows from one slot to another. Only the computing thread
        may call this. Nothing else of the slot is written, so rows that are not needed take no memory."""
        runs = self.footprint.runs(rows)

        def copy() -> None:
            for pool in self.pools:
                for exact in (pool.open_k, pool.open_v):
                    for run in runs:
                        exact[target, :, run] = exact[source, :, run]

        self.lanes.compute.run(copy)
        self.lanes.written()

    def forget_slots(self, slots: Iterable[int]) -> None:
        """Give the memory of slots back to the system; their contents are lost. No sequence may hold these slots, and
        nothing may compute or copy in them."""
        for _, run in groupby(enumerate(sorted(slots)), lambda numbered: numbered[1] - numbered[0]):
            numbers = [slot for _, slot in run]
            for pool in self.pools:
                for exact in (pool.open_k, pool.open_v):
                    forget(exact, range(numbers[0], numbers[-1] + 1))

    def rest(self, layer: int, pages: Tensor) -> Iterator[Leaving]:
        """Sealed pages, [P] int64, as they rest: name -> [P, Hkv, ...]; in order, part by part."""
        planes = self.pools[layer].planes
        return self._fetched(
            pages, self.at_once(layer, len(pages)), lambda ids: {n: p.index_select(0, ids) for n, p in planes.items()}
        )

    def at_once(self, layer: int, pages: int) -> Iterator[range]:
        """The parts in which so many pages go to host memory, or come back from there."""
        return self.lanes.pieces(pages, [plane[:1].nbytes for plane in self.pools[layer].planes.values()])

    def put_back(self, layer: int, pages: Tensor, resting: Planes) -> None:
        """Write one part of what `rest` gave to `pages`, [P] int64."""

        def write(ids: Tensor, here: Planes) -> None:
            for name, plane in here.items():
                self.pools[layer].planes[name].index_copy_(0, ids, plane)

        self.lanes.bring(pages, resting, write)

    def copy_out(self, pages: Sequence[int], slot: int, rows: int) -> HostKv:
        """Copy a sequence's pages, and the exact ones of its `rows` rows, to host memory."""
        layers, ids = range(len(self.pools)), _ids(pages)
        sealed = tuple(tuple(leaving.own() for leaving in self.rest(layer, ids)) for layer in layers)
        exact = tuple(self.export_rows(layer, slot, rows).own() for layer in layers)
        return HostKv(sealed, exact, len(pages), rows)

    def copy_back(self, kv: HostKv, pages: Sequence[int], slot: int) -> None:
        """Write `kv` to the first of `pages` and to a slot."""
        ids = _ids(pages)
        with self.lanes.arriving():
            for layer, (sealed, exact) in enumerate(zip(kv.sealed, kv.exact, strict=True)):
                at = 0
                for planes in sealed:
                    stop = at + len(next(iter(planes.values())))
                    self.put_back(layer, ids[at:stop], planes)
                    at = stop
                self.install_rows(layer, self._heads, slot, self.footprint.runs(kv.rows), exact)

    def resume(self, kv: HostKv, slot: int, rows: int) -> None:
        """Write to a slot the exact rows in `kv` that a sequence still sees when it comes to `rows` rows. They
        are those of the sequence's first full pages."""
        page_tokens, window = self.footprint.page_tokens, self.footprint.window
        seen = set(self.footprint.exact_pages(rows))
        with self.lanes.arriving():
            for index, page in enumerate(self.footprint.exact_pages(kv.rows)):
                if page not in seen:
                    continue
                at, place = index * page_tokens, window.place(page) * page_tokens
                for layer, exact in enumerate(kv.exact):
                    planes = {name: plane[:, :, at : at + page_tokens] for name, plane in exact.items()}
                    self.install_rows(layer, self._heads, slot, (slice(place, place + page_tokens),), planes)

    def _fetched(self, pages: Tensor, parts: Iterator[range], read: Callable[[Tensor], Planes]) -> Iterator[Leaving]:
        """Yield what `read` makes of pages, part by part. A part leaves when the iterator is asked for it."""
        return (self.lanes.fetch(pages[part.start : part.stop], read, part.start) for part in parts)

    def _read(self, slot: Tensor, rows: int, first: int = 0) -> Tensor:
        """The exact rows [Hkv, exact rows, D] of a sequence that holds `rows` rows, page after page from number `first`
        on: a copy."""
        runs = self.footprint.runs(rows, first)
        return torch.cat([slot[:, run] for run in runs], dim=1) if runs else slot[:, :0].clone()


class HostPages:
    """Sealed pages in host memory: one block of memory for each plane, with numbered places for pages.

    Thousands of small, short-lived tensors would fragment the allocator's heap, and the process would grow. The first
    write to a place takes its memory from the system.
    """

    def __init__(self, memory: KvMemory, num_pages: int) -> None:
        self._memory = memory
        self._layers = [
            {name: torch.empty((num_pages, *plane.shape[1:]), dtype=plane.dtype) for name, plane in pool.planes.items()}
            for pool in memory.pools
        ]

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages of the pools to places here; no place may be named twice."""
        there, here = _ids(pages), _ids(places)
        for layer, copies in enumerate(self._layers):
            for leaving in self._memory.rest(layer, there):
                with leaving as planes:
                    for name, plane in planes.items():
                        copies[name].index_copy_(0, here[leaving.first : leaving.first + len(plane)], plane)

    def load(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy places here to pages of the pools."""
        here, there = _ids(places), _ids(pages)
        with self._memory.lanes.arriving():
            for layer, copies in enumerate(self._layers):
                for part in self._memory.at_once(layer, len(pages)):
                    at = slice(part.start, part.stop)
                    planes = {name: plane.index_select(0, here[at]) for name, plane in copies.items()}
                    self._memory.put_back(layer, there[at], planes)


def _write(slot: Tensor, runs: Sequence[slice], exact: Tensor) -> None:
    """Write rows [Hkv, exact rows, D] to these runs of a slot [Hkv, E·Π, D]."""
    at = 0
    for run in runs:
        count = run.stop - run.start
        slot[:, run] = exact[:, at : at + count]
        at += count


def _ids(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
