"""Backend `triton`: kernels for NVIDIA GPUs. This file checks inputs and hands them over.

No call waits for the device, so values in its memory (page ids, lengths) are not checked: checks read only tensors in
host memory. Under TRITON_INTERPRET=1 all tensors lie there: the same kernels run without a GPU, slowly, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from hack_kernels.base import (
    Backend,
    BackendUnavailable,
    FormatT,
    KernelsT,
    PageFormat,
    PageKernels,
    Planes,
    Pool,
    RowKernels,
    Rows,
    Spans,
    Stopwatch,
)
from hack_kernels.check import check_attention, check_install, check_requantize, check_seal
from hack_kernels.compiler import Compiler
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.device_choosing import DeviceRows
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat
from hack_kernels.hack_format import HEAD_DIMS, PAGE_TOKENS, HackFormat, OpenPage
from hack_kernels.huffman_format import HuffmanFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.nuq_format import NuqFormat
from hack_kernels.reference.hack import HackReference
from hack_kernels.row_format import RowFormat
from hack_kernels.stopwatch import HostStopwatch
from hack_kernels.triton.support import NO_TRITON, missing

try:
    import triton
except ModuleNotFoundError as error:
    raise BackendUnavailable(NO_TRITON) from error

from hack_kernels.triton import decode, exchange, layout, prefill
from hack_kernels.triton.ahead import TritonCompiler
from hack_kernels.triton.code_tiles import CODE_BITS
from hack_kernels.triton.deltas import DeltaTriton
from hack_kernels.triton.dense import attn_dequantized, hack_sides
from hack_kernels.triton.events import EventStopwatch, mark
from hack_kernels.triton.floats import WIDEST, FloatTriton
from hack_kernels.triton.groups import GroupTriton, takes_groups
from hack_kernels.triton.head_rotation import RotatedHeads
from hack_kernels.triton.huffman import HuffmanTriton
from hack_kernels.triton.levels import NARROWEST, LevelTriton
from hack_kernels.triton.nuq import NuqTriton
from hack_kernels.triton.reading import InRecords
from hack_kernels.triton.row_ops import FusedRows
from hack_kernels.triton.rows import RowTriton
from hack_kernels.triton.seal import seal
from hack_kernels.triton.split import PROGRAMS_PER_PROCESSOR, Workspace
from hack_kernels.triton.xxh3 import xxh3_64

PREFILL_VARIABLE: Final = "HACKKV_TRITON_PREFILL"
"""Environment variable that says how prompts are attended to: dense (default) or homomorphic."""


class Prefill(StrEnum):
    """How a prompt attends to pages with codes of HACK or of levels. Pages are sealed as codes either way."""

    HOMOMORPHIC = "homomorphic"
    """On codes, as in the paper."""
    DENSE = "dense"
    """In FP16 on dequantized pages (dense.py), several times as fast on an H200."""


class HackTriton:
    """Implements `HackKernels`. A page is one record, whose planes are views (`layout.py`)."""

    served_by = "triton"

    def __init__(self, fmt: HackFormat, device: torch.device, workspace: Workspace, prefill: Prefill) -> None:
        self.fmt, self.device = fmt, device
        self.approximation_s = 0.0  # the correction terms are fused into the products; they have no time of their own
        self._workspace, self._prefill = workspace, prefill

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Views into one record per page and KV head."""
        return tuple(layout.new_pages(cast(HackFormat, fmt), num_pages, num_kv_heads, self.device) for fmt in formats)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool in one pass."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        layout.check_records(self.fmt, pool.planes)
        if page_ids.numel():
            seal(self.fmt, layer, pool, page_ids, starts, k, v)

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        """The ablation HACK/RQE runs on the reference: the pages go there and back, bit-exact."""
        check_requantize(self.fmt, pool, spans, k, v)
        there = _OnReference(self.fmt, pool, spans)
        there.kernels.requantize(layer, there.pool, there.spans, k.cpu(), v.cpu())
        # Only pages that took rows go back: another call may write the other pages of the table meanwhile.
        starts, page_tokens = there.spans.starts, self.fmt.page_tokens
        first, last = starts // page_tokens, (starts + there.spans.counts - 1) // page_tokens
        columns = torch.arange(there.spans.table.shape[1])
        took = (first[:, None] <= columns) & (columns <= last[:, None])
        ids, places = spans.table[took.to(self.device)], there.spans.table[took]
        for name, plane in layout.from_wire(self.fmt, there.pool.planes).items():
            pool.planes[name][ids] = plane[places].to(self.device)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Wire order to records; absent sums are counted."""
        check_install(self.fmt, pool, page_ids, planes)
        layout.check_records(self.fmt, pool.planes)
        if page_ids.numel():
            exchange.install(self.fmt, pool.planes, page_ids, planes)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Records to wire order."""
        layout.check_records(self.fmt, pool.planes)
        return exchange.export(self.fmt, pool.planes, page_ids)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention by INT8 products. Decode divides pages among programs. A prompt multiplies tiles of queries by one
        page after another, or reads dequantized pages (`Prefill`)."""
        check_attention(self.fmt, pool, spans, rows)
        layout.check_records(self.fmt, pool.planes)
        fmt, q = self.fmt, rows.q
        if fmt.open_page is OpenPage.REQUANTIZE:
            there = _OnReference(fmt, pool, spans)
            new = [None if x is None else x.cpu() for x in (rows.k, rows.v)]
            return there.kernels.attend(layer, there.pool, there.spans, Rows(q.cpu(), *new)).to(self.device)
        if rows.k is None or rows.v is None:
            if fmt.open_page is OpenPage.EXACT:
                return decode.attn_decode(fmt, pool, spans, q, self._workspace)
            at = spans.starts % fmt.page_tokens
            own_k, own_v = (x[spans.slots, :, at] for x in (pool.open_k, pool.open_v))
            return prefill.attn_prefill(fmt, layer, pool, spans, q, own_k, own_v)
        if self._prefill is Prefill.DENSE and fmt.open_page is OpenPage.EXACT:
            bits = fmt.k_bits, fmt.v_bits
            return attn_dequantized(pool, spans, rows, lambda ids: hack_sides(self.export(pool, ids), bits))
        return prefill.attn_prefill(fmt, layer, pool, spans, q, rows.k, rows.v)


class _OnReference:
    """The pages that a batch reads, in host memory and the reference's order, and spans that index them."""

    def __init__(self, fmt: HackFormat, pool: Pool, spans: Spans) -> None:
        self.kernels = HackReference(fmt, torch.device("cpu"))
        ids, places = torch.unique(spans.table, return_inverse=True)
        planes = layout.to_wire(fmt, {name: plane[ids].cpu() for name, plane in pool.planes.items()})
        self.pool = Pool(planes, pool.open_k.cpu(), pool.open_v.cpu(), pool.head_start)
        starts, counts, offsets, slots = (t.cpu() for t in (spans.starts, spans.counts, spans.offsets, spans.slots))
        self.spans = Spans(starts, counts, offsets, places.view_as(spans.table).cpu(), slots)


class TritonRows(FusedRows, RotatedHeads, DeviceRows):
    """Implements `RowKernels`. Each operation of a decode step between products is one launch, and tokens are chosen on
    the device. Torch computes products and the operations that only prompts need."""


class TritonBackend:
    """Implements `Backend`; all arguments lie on `device`. Formats without kernels run in torch on that device."""

    name = "triton"
    isa = "triton"

    def __init__(self, device: torch.device, prefill: Prefill = Prefill.DENSE) -> None:
        self.device = device
        self.compiler: Compiler | None = TritonCompiler() if device.type == "cuda" else None
        self.rows: RowKernels = TritonRows()
        self.prefill = prefill
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.workspace = Workspace(device, PROGRAMS_PER_PROCESSOR * processors)

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        """Triton, if it has kernels for the format and its widths."""
        found = FORMATS[type(fmt)](fmt, self) if type(fmt) in FORMATS else None
        return definition(fmt, self.device) if found is None else cast(KernelsT, found)

    def stopwatch(self) -> Stopwatch:
        """A stopwatch by events on a GPU. Interpreted calls return when the work is done: the host's clock serves."""
        if self.device.type != "cuda":
            return HostStopwatch()
        return EventStopwatch(partial(mark, self.device))

    def xxh3_64(self, pieces: Sequence[Tensor], seed: int) -> list[int]:
        """XXH3-64 in two launches a piece. The host waits once."""
        return xxh3_64(pieces, seed)

    def use_threads(self, threads: int) -> None:
        """Set torch's threads. There are no others."""
        torch.set_num_threads(threads)


def _for_codes(fmt: HackFormat, backend: TritonBackend) -> PageKernels | None:
    """Kernels for widths of codes that divide a byte into several fields; else None."""
    if not {fmt.k_bits, fmt.v_bits} <= set(CODE_BITS):
        return None
    return HackTriton(fmt, backend.device, backend.workspace, backend.prefill)


def _read(kernels: type[InRecords]) -> Callable[[Any, TritonBackend], PageKernels | None]:
    """Kernels for fused conversion of a format, in the shapes of codes up to `WIDEST`; else None."""

    def found(fmt: Any, backend: TritonBackend) -> PageKernels | None:
        shaped = fmt.head_dim in HEAD_DIMS and fmt.head_dim <= WIDEST and fmt.page_tokens in PAGE_TOKENS
        return kernels(fmt, backend.device, backend.workspace) if fmt.fused and shaped else None

    return found


def _for_groups(fmt: GroupFormat, backend: TritonBackend) -> PageKernels | None:
    """As `_read`, if `takes_groups`."""
    return _read(GroupTriton)(fmt, backend) if takes_groups(fmt) else None


def _for_levels(fmt: LevelFormat, backend: TritonBackend) -> PageKernels | None:
    """Kernels for all widths of codes and heads of `NARROWEST` channels or more; else None."""
    if fmt.head_dim < NARROWEST:
        return None
    return LevelTriton(fmt, backend.device, backend.workspace, dense=backend.prefill is Prefill.DENSE)


def _for_rows(fmt: RowFormat, backend: TritonBackend) -> PageKernels | None:
    """Kernels for the shapes of codes; else None."""
    if fmt.head_dim not in HEAD_DIMS or fmt.page_tokens not in PAGE_TOKENS:
        return None
    return RowTriton(fmt, backend.device, backend.workspace)


FORMATS: Final[dict[type[PageFormat], Callable[[Any, TritonBackend], PageKernels | None]]] = {
    DeltaFormat: _read(DeltaTriton),
    FloatFormat: _read(FloatTriton),
    GroupFormat: _for_groups,
    HackFormat: _for_codes,
    HuffmanFormat: _read(HuffmanTriton),
    LevelFormat: _for_levels,
    NuqFormat: _read(NuqTriton),
    RowFormat: _for_rows,
}
"""Class of page format -> function of a format and the backend; it returns None for a format without kernels."""


def create(device: torch.device | None = None) -> Backend:
    """The backend on a GPU, by default the current one, or on the processor under TRITON_INTERPRET=1.

    Raises `BackendUnavailable` with the reason.
    """
    chosen = os.environ.get(PREFILL_VARIABLE) or Prefill.DENSE
    if chosen not in list(Prefill):
        raise BackendUnavailable(f"{PREFILL_VARIABLE} is {chosen!r}; it must be one of {', '.join(Prefill)}")
    if triton.knobs.runtime.interpret:
        if device is not None and device.type != "cpu":
            raise BackendUnavailable(f"under TRITON_INTERPRET=1 it computes on the processor, not on {device}")
        return TritonBackend(torch.device("cpu"), Prefill(chosen))
    if device is not None and device.type != "cuda":
        raise BackendUnavailable(f"it computes on a GPU, not on {device} (TRITON_INTERPRET=1 runs it there, slowly)")
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if reason := missing(device):
        raise BackendUnavailable(f"{reason} (TRITON_INTERPRET=1 runs the kernels without a GPU, slowly)")
    return TritonBackend(device, Prefill(chosen))
