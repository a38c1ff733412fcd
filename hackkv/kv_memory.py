"""The KV of one node: every layer's pool on its device, and every way in and out of it.

Pages go to the wire in wire order (`export`) and come from it (`install`), by layer and range of KV heads. They go to
host memory and back in their resting order, so nothing is converted or rounded (`copy_out`, `copy_back`, `HostPages`).
Schedulers decide who may touch which page. The methods here touch only the pages that they are given; any thread may
call them for pages that nobody else uses. Pinned memory and copy streams of a GPU belong in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hack_kernels.base import Planes, Pool
from torch import Tensor

from hackkv.codec import Batch, KvCodec, Span
from hackkv.footprint import Footprint, footprint_of
from hackkv.types import KvFrame, KvLayout

OPEN_PLANES = ("open_k", "open_v")
"""Names of the planes in which the exact rows of a sequence travel, [Hkv, 1, rows, D] float16."""


@dataclass(frozen=True, slots=True)
class HostKv:
    """The KV of one sequence in host memory: one pool per layer, with its pages and one slot for its exact rows."""

    layers: tuple[Pool, ...]
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
        heads = range(layout.num_kv_heads)
        self.pools: tuple[Pool, ...] = codec.new_pools(num_pages, num_slots, heads, prompts=prompts)
        self._codec = codec

    def export(self, layer: int, pages: Sequence[int]) -> Planes:
        """Sealed pages as planes that travel: name -> [Hkv, P, *plane shape], contiguous, in host memory."""
        pool = self.pools[layer]
        planes = self._codec.to_wire(layer, pool, _index(pool, pages))
        return {name: plane.cpu() for name, plane in planes.items()}

    def export_rows(self, layer: int, slot: int, rows: int, first: int = 0) -> Planes:
        """The exact rows of a sequence that holds `rows` rows, page after page from number `first` on, as planes
        `open_k` and `open_v` [Hkv, 1, exact rows, D], in host memory."""
        pool = self.pools[layer]
        exact = zip(OPEN_PLANES, (pool.open_k, pool.open_v), strict=True)
        return {name: self._read(slots[slot], rows, first)[:, None].cpu() for name, slots in exact}

    def install(self, layer: int, heads: range, pages: Sequence[int], planes: Planes) -> None:
        """Write what `export` of an equal codec gave, for some of the KV heads, bit-exact."""
        pool = self.pools[layer].heads(heads.start, len(heads))
        here = {name: plane.to(pool.device) for name, plane in planes.items()}
        self._codec.from_wire(layer, pool, _index(pool, pages), here)

    def install_rows(self, layer: int, heads: range, slot: int, runs: Sequence[slice], planes: Planes) -> None:
        """Write what `export_rows` gave of these runs (`Footprint.runs`), for some of the KV heads."""
        pool = self.pools[layer].heads(heads.start, len(heads))
        for name, exact in zip(OPEN_PLANES, (pool.open_k, pool.open_v), strict=True):
            _write(exact[slot], runs, planes[name][:, 0])

    def seal_rows(self, layer: int, pages: Sequence[int], slot: int, rows: int, first: int) -> None:
        """Seal those of the first `pages` of a sequence of `rows` rows, from number `first` on, whose rows came exactly
        and which therefore did not come sealed: the bytes are those that any other node has."""
        numbers = self.footprint.exact_pages(rows, first)
        if not numbers:
            return
        pool, page_tokens = self.pools[layer], self.footprint.page_tokens
        spans = [Span(slot, number * page_tokens, page_tokens, tuple(pages)) for number in numbers]
        places = [self.footprint.window.place(number) * page_tokens for number in numbers]
        exact = (pool.open_k[slot], pool.open_v[slot])
        k, v = (torch.cat([held[:, at : at + page_tokens] for at in places], 1).transpose(0, 1) for held in exact)
        self._codec.seal(layer, pool, Batch.of(spans, page_tokens, pool.device), k, v)

    def install_frame(
        self, frame: KvFrame, planes: Planes, pages: Sequence[int], slot: int, runs: Sequence[slice]
    ) -> None:
        """Write a frame's planes to the pages that a sequence holds, or its exact rows to these runs of `slot`."""
        heads = range(frame.head_start, frame.head_start + frame.head_count)
        if frame.rows:
            self.install_rows(frame.layer, heads, slot, runs, planes)
        else:
            due = pages[frame.page_start : frame.page_start + frame.page_count]
            self.install(frame.layer, heads, due, planes)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the exact rows of one slot to another."""
        for pool in self.pools:
            for exact in (pool.open_k, pool.open_v):
                exact[target] = exact[source]

    def copy_out(self, pages: Sequence[int], slot: int, rows: int) -> HostKv:
        """Copy a sequence's pages, and the exact ones of its `rows` rows, to host memory."""
        ids = _index(self.pools[0], pages)
        layers = tuple(
            Pool(
                {name: plane.index_select(0, ids).cpu() for name, plane in pool.planes.items()},
                self._read(pool.open_k[slot], rows).cpu()[None],
                self._read(pool.open_v[slot], rows).cpu()[None],
                pool.head_start,
            )
            for pool in self.pools
        )
        return HostKv(layers, len(pages), rows)

    def copy_back(self, kv: HostKv, pages: Sequence[int], slot: int) -> None:
        """Write `kv` to the first of `pages` and to a slot."""
        ids = _index(self.pools[0], pages[: kv.pages])
        for pool, layer in zip(self.pools, kv.layers, strict=True):
            for name, plane in layer.planes.items():
                pool.planes[name].index_copy_(0, ids, plane.to(pool.device))
            for exact, saved in ((pool.open_k, layer.open_k), (pool.open_v, layer.open_v)):
                _write(exact[slot], self.footprint.runs(kv.rows), saved[0])

    def resume(self, kv: HostKv, slot: int, rows: int) -> None:
        """Write to a slot what a sequence that will come to `rows` rows still sees of the exact rows in `kv`, which are
        those of its first full pages."""
        page_tokens, window = self.footprint.page_tokens, self.footprint.window
        seen = set(self.footprint.exact_pages(rows))
        for index, page in enumerate(self.footprint.exact_pages(kv.rows)):
            if page in seen:
                at, place = index * page_tokens, window.place(page) * page_tokens
                for pool, layer in zip(self.pools, kv.layers, strict=True):
                    for exact, saved in ((pool.open_k, layer.open_k), (pool.open_v, layer.open_v)):
                        exact[slot, :, place : place + page_tokens] = saved[0, :, at : at + page_tokens]

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
        self._pairs = [
            (plane, torch.empty((num_pages, *plane.shape[1:]), dtype=plane.dtype))
            for pool in memory.pools
            for plane in pool.planes.values()
        ]

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages of the pools to places here; no place may be named twice."""
        there, here = _ids(pages), _ids(places)
        for plane, copies in self._pairs:
            copies[here] = plane[there.to(plane.device)].cpu()

    def load(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy places here to pages of the pools."""
        here, there = _ids(places), _ids(pages)
        for plane, copies in self._pairs:
            plane[there.to(plane.device)] = copies[here].to(plane.device)


def _write(slot: Tensor, runs: Sequence[slice], exact: Tensor) -> None:
    """Write rows [Hkv, exact rows, D] to these runs of a slot [Hkv, E·Π, D]."""
    at = 0
    for run in runs:
        count = run.stop - run.start
        slot[:, run] = exact[:, at : at + count]
        at += count


def _index(pool: Pool, pages: Sequence[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=pool.device)


def _ids(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
