"""The life of a page, which all codecs share: rows collect in a slot, a full page is sealed, queries read both.

A subclass says how to seal and how to attend. The order of the steps matters. In a prefill batch, queries still read
the FP16 rows of a page that is sealed already, so the slot is overwritten last. In decode the new row is written first,
so sealing and attention find it in the slot. If few rows of a prefill batch are wanted (`Batch.ends`), only they attend
in the last layer: as in decode, once all rows are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hack_kernels.base import Backend, PageFormat, PageKernels, Plane, Planes, Pool, RowKernels, Rows, Spans
from hack_kernels.bounded import BoundedKernels
from hack_kernels.pools import new_pools, with_notes
from torch import Tensor

from hackkv.batch import Batch, Fills
from hackkv.choices import Eviction, Selection
from hackkv.codec import AttentionWeights, Origin
from hackkv.wire_form import RAW, WireForm

Settings = tuple[tuple[str, str], ...]
"""Named settings, as text, for the fingerprint."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The format and kernels of a layer's pages. Layers of one format share one set of kernels."""

    format: PageFormat
    kernels: PageKernels
    """Bound to the format."""
    sent: tuple[Plane, ...] | None = None
    """The planes that travel; None for those that are not derived."""

    @property
    def wire_planes(self) -> tuple[Plane, ...]:
        """The planes that travel, in wire order."""
        return self.sent or tuple(plane for plane in self.format.planes if not plane.derived)


def laid_out_by(kernels: PageKernels) -> type:
    """The class of the kernels that give pages their order."""
    return kernels.laid_out_by if isinstance(kernels, BoundedKernels) else type(kernels)


class PagedCodec:
    """Implements `KvCodec` for any page formats. A codec that differs in other steps inherits it."""

    prepares_weights = False
    lossless = False
    codes_where_it_pays = False
    origin: Origin | None = None
    eviction: Eviction | None = None
    selection: Selection | None = None

    def __init__(self, name: str, layers: tuple[Kept, ...], backend: Backend, settings: Settings) -> None:
        """`settings` are all that change bytes or results. Layers may differ in everything but page size and window."""
        self.name = name
        (self.page_tokens,) = {kept.format.page_tokens for kept in layers}
        (self.window,) = {kept.format.window for kept in layers}
        self.wire_form: WireForm = RAW
        self.sealing, self.attending = backend.stopwatch(), backend.stopwatch()
        self.layers, self.settings = layers, settings
        self._backend = backend

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        """Page formats, by layer."""
        return tuple(kept.format for kept in self.layers)

    @property
    def wire_planes(self) -> tuple[tuple[Plane, ...], ...]:
        """Planes of a page that travel, by layer."""
        return tuple(kept.wire_planes for kept in self.layers)

    @property
    def seals_open_page(self) -> bool:
        """The open page stays in FP16."""
        return False

    @property
    def bytes_follow_tokens(self) -> bool:
        """True by the open-page rule, unless rows are evicted or the open page is sealed anew with every row."""
        return self.eviction is None and not self.seals_open_page

    @property
    def decodes_as_prefill(self) -> bool:
        """True unless decode reads some of the pages only."""
        return self.selection is None and type(self).visible is PagedCodec.visible

    @property
    def quantize_s(self) -> float:
        """Seconds on the stopwatch `sealing`."""
        return self.sealing.seconds

    @property
    def attend_s(self) -> float:
        """Seconds on the stopwatch `attending`."""
        return self.attending.seconds

    @property
    def approximation_s(self) -> float:
        """Seconds that the kernels of all layers report."""
        return sum(kernels.approximation_s for kernels in dict.fromkeys(kept.kernels for kept in self.layers))

    @property
    def served_by(self) -> str:
        """`served_by` of the kernels of all layers, each name once."""
        return ", ".join(dict.fromkeys(kept.kernels.served_by for kept in self.layers))

    @property
    def rows(self) -> RowKernels:
        """The backend's operations on rows."""
        return self._backend.rows

    def fingerprint(self) -> Settings:
        """Name and settings; the backend is not among them, since backends agree bit for bit."""
        return (("codec", self.name), *((f"codec.{name}", value) for name, value in self.settings))

    def prepare_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """The weights as they came: nothing is folded."""
        return weights

    def new_pools(self, num_pages: int, num_slots: int, heads: range, *, prompts: bool = False) -> tuple[Pool, ...]:
        """Empty pools on the backend's device. Layers with kernels of one class lie together."""
        notes = self.eviction.notes if prompts and self.eviction else ()
        pools = dict[type, Iterator[Pool]]()
        for kind, kernels in {laid_out_by(kept.kernels): kept.kernels for kept in self.layers}.items():
            formats = [kept.format for kept in self.layers if laid_out_by(kept.kernels) is kind]
            pools[kind] = iter(new_pools(formats, kernels, self._backend.device, num_pages, num_slots, heads))
        return tuple(with_notes(next(pools[laid_out_by(kept.kernels)]), notes) for kept in self.layers)

    def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append rows and attend; see `KvCodec.attend`."""
        kernels, rows = self.layers[layer].kernels, self._backend.rows
        if batch.is_decode:
            rows.append(pool, batch.where, k, v, batch.faulty)
            self.seal(layer, pool, batch)
            with self.attending:
                out = kernels.attend(layer, pool, self.visible(layer, pool, batch, q), Rows(q))
                if self.eviction and any(span.prompt for span in batch.spans):  # a chunk of one row
                    self.eviction.observe(pool, batch, q, *decode_rows(pool, batch))
            return out
        narrowed = rows.narrow(k, v, batch.where, batch.faulty)
        self.seal(layer, pool, batch, narrowed)
        if batch.ends is not None and layer + 1 == len(self.layers):
            with self.attending:
                write_exact_rows(pool, batch, *narrowed)
                wanted = q[batch.ends.rows]
                return kernels.attend(layer, pool, batch.ends.where, Rows(wanted)) if len(wanted) else wanted
        with self.attending:
            out = kernels.attend(layer, pool, batch.where, Rows(q, *narrowed))
            write_exact_rows(pool, batch, *narrowed)
            if self.eviction:
                self.eviction.observe(pool, batch, q, *narrowed)
        return out

    def visible(self, layer: int, pool: Pool, batch: Batch, q: Tensor) -> Spans:
        """The pages that the queries q [B, Hq, D] of a decode batch attend to; by default all of their sequences.

        A codec that reads only some pages lists them, per sequence or per KV head (`some_pages`). Such a codec has no
        window: kernels tell exact pages by their numbers.
        """
        return batch.where if self.selection is None else self.selection.visible(layer, pool, batch, q)

    def seal(self, layer: int, pool: Pool, batch: Batch, rows: tuple[Tensor, Tensor] | None = None) -> None:
        """Seal the pages that `batch` fills, in one kernel call. `rows` are K and V of the whole batch, [T, Hkv, D]
        float16; None where they stand in the slots already."""
        fills = batch.fills
        if fills is None:
            return
        with self.sealing:
            if rows is None:
                self.seal_held(layer, pool, fills)
            else:
                pages = filled_pages(pool, batch, *rows)
                self.layers[layer].kernels.seal(layer, pool, fills.page_ids, fills.starts, *pages)

    def seal_held(self, layer: int, pool: Pool, fills: Fills) -> None:
        """Seal pages from their slots, in one kernel call."""
        self.layers[layer].kernels.seal(layer, pool, fills.page_ids, fills.starts, *held_rows(pool, fills))

    def to_wire(self, layer: int, pool: Pool, page_ids: Tensor) -> Planes:
        """Planes that travel. Derived planes stay behind unless the codec sends them."""
        planes = self.layers[layer].kernels.export(pool, page_ids)
        return {plane.name: planes[plane.name] for plane in self.layers[layer].wire_planes}

    def from_wire(self, layer: int, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Install sealed pages; the kernels bring them into their own order."""
        self.layers[layer].kernels.install(pool, page_ids, planes)


def write_exact_rows(pool: Pool, batch: Batch, k: Tensor, v: Tensor) -> None:
    """Copy the rows that each sequence keeps exactly from now on into its slot. k, v [T, Hkv, D] float16."""
    pi, window = batch.page_tokens, pool.window
    offset = 0
    for span in batch.spans:
        end = span.held + span.count
        last = (end - 1) // pi  # even a full page: its last row may attend alone (`Batch.ends`), and sees it exactly
        for page in (*window.earlier(last), last):
            begin, stop = max(span.held, page * pi), min(end, (page + 1) * pi)
            if begin >= stop:
                continue
            rows, at = (
                slice(offset + begin - span.held, offset + stop - span.held),
                window.place(page) * pi + begin % pi,
            )
            for exact_rows, x in ((pool.open_k, k), (pool.open_v, v)):
                exact_rows[span.slot, :, at : at + stop - begin] = x[rows].transpose(0, 1)
        offset += span.count


def decode_rows(pool: Pool, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of a decode batch, [B, Hkv, D] float16, from their places in the slots."""
    slots, at = batch.where.slots, pool.window.at(batch.where.starts, batch.page_tokens)
    return pool.open_k[slots, :, at], pool.open_v[slots, :, at]


def held_rows(pool: Pool, fills: Fills) -> tuple[Tensor, Tensor]:
    """K and V of full pages, [P, Hkv, Π, D] float16, from their places in the slots."""
    pi = pool.page_tokens
    at = pool.window.at(fills.starts, pi)[:, None] + torch.arange(pi, device=pool.device)
    slots = fills.slots[:, None]
    k, v = (exact[slots, :, at].transpose(1, 2).contiguous() for exact in (pool.open_k, pool.open_v))
    return k, v


def filled_pages(pool: Pool, batch: Batch, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the pages that `batch` fills, [P, Hkv, Π, D] float16: rows of the slot first, then the batch's own."""
    pi = batch.page_tokens
    pages: tuple[list[Tensor], list[Tensor]] = ([], [])
    for page in batch.filled:
        rows = slice(page.row, page.row + pi - page.old)
        slot, at = batch.spans[page.span].slot, pool.window.place(page.start // pi) * pi
        for out, open_rows, x in ((pages[0], pool.open_k, k), (pages[1], pool.open_v, v)):
            new = x[rows].transpose(0, 1)
            out.append(torch.cat((open_rows[slot, :, at : at + page.old], new), dim=1) if page.old else new)
    return torch.stack(pages[0]), torch.stack(pages[1])
