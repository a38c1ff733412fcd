"""Backend `triton`: kernels for NVIDIA GPUs. This file checks inputs and hands them over.

No call waits for the device, so values that lie there (page ids, lengths) are taken on trust: checks read them only
where the tensors are the processor's. That is so under TRITON_INTERPRET=1, with which the same kernels run without a
GPU, slowly, for tests.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import BackendUnavailable, HackFormat, HackKernels, HackPages, OpenPage, Spans
from hack_kernels.check import check_attention, check_install, check_requantize, check_seal
from hack_kernels.reference import ReferenceKernels
from hack_kernels.rowwise import Rowwise

try:
    import triton
except ModuleNotFoundError as error:
    raise BackendUnavailable("Triton is not installed: pip install 'hackkv[gpu]'") from error

from hack_kernels.triton import decode, exact, exchange, layout, prefill
from hack_kernels.triton.seal import seal
from hack_kernels.triton.split import Workspace
from hack_kernels.triton.support import missing

PREFILL_VARIABLE: Final = "HACKKV_TRITON_PREFILL"
"""Environment variable that says how prompts are attended to: homomorphic (default) or exact."""

PROGRAMS_PER_PROCESSOR: Final = 3
"""Decode programs that a multiprocessor holds at a time: four warps each, by the registers that they take."""


class Prefill(StrEnum):
    """How `attn_prefill` computes. EXACT (exact.py) is BF16 attention by torch; codes are made all the same."""

    HOMOMORPHIC = "homomorphic"
    EXACT = "exact"


class TritonKernels(Rowwise):
    """Implements `HackKernels`; all arguments lie on `device`."""

    name = "triton"
    isa = "triton"

    def __init__(self, device: torch.device, prefill: Prefill = Prefill.HOMOMORPHIC) -> None:
        self.approximation_s = 0.0  # the correction terms are fused into the products; they have no time of their own
        self.device = device
        self.prefill = prefill
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.workspace = Workspace(device, PROGRAMS_PER_PROCESSOR * processors)

    def new_pages(self, fmt: HackFormat, num_pages: int, num_kv_heads: int) -> HackPages:
        """A zeroed pool for one layer: planes are views into one record per page and KV head."""
        return layout.new_pages(fmt, num_pages, num_kv_heads, self.device)

    def seal(
        self, fmt: HackFormat, layer: int, pages: HackPages, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Quantize full pages into the pool in one pass."""
        check_seal(fmt, pages, page_ids, starts, k, v)
        layout.check_records(fmt, pages)
        if page_ids.numel():
            seal(fmt, layer, pages, page_ids, starts, k, v)

    def requantize(self, fmt: HackFormat, layer: int, pages: HackPages, spans: Spans, k: Tensor, v: Tensor) -> None:
        """The ablation HACK/RQE runs on the reference: the pages go there and back, bit-exact."""
        check_requantize(fmt, pages, spans, k, v)
        pool, (k, v), local = self._on_reference(fmt, pages, spans, (k, v))
        ReferenceKernels().requantize(fmt, layer, pool, local, k, v)
        # Only pages that took rows go back: what else stands in the table may be written by somebody else meanwhile.
        first, last = local.starts // fmt.page_tokens, (local.starts + local.counts - 1) // fmt.page_tokens
        columns = torch.arange(local.table.shape[1])
        took = (first[:, None] <= columns) & (columns <= last[:, None])
        ids, places = spans.table[took.to(self.device)], local.table[took]
        for name, plane in layout.from_wire(fmt, pool).items():
            pages[name][ids] = plane[places].to(self.device)

    def install(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor, planes: HackPages) -> None:
        """Wire order to records; absent sums are counted."""
        check_install(fmt, pages, page_ids, planes)
        layout.check_records(fmt, pages)
        if page_ids.numel():
            exchange.install(fmt, pages, page_ids, planes)

    def export(self, fmt: HackFormat, pages: HackPages, page_ids: Tensor) -> HackPages:
        """Records to wire order."""
        layout.check_records(fmt, pages)
        return exchange.export(fmt, pages, page_ids)

    def attn_prefill(
        self,
        fmt: HackFormat,
        layer: int,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """INT8 products over sealed pages, tiles of queries against one page after another; or as `prefill` says."""
        check_attention(fmt, pages, open_k, open_v, spans, q, k, v)
        layout.check_records(fmt, pages)
        if fmt.open_page is OpenPage.REQUANTIZE:
            pool, rows, local = self._on_reference(fmt, pages, spans, (open_k, open_v, q, k, v))
            own_k, own_v, q_rows, k_rows, v_rows = rows
            out = ReferenceKernels().attn_prefill(fmt, layer, pool, own_k, own_v, local, q_rows, k_rows, v_rows)
            return out.to(self.device)
        if self.prefill is Prefill.EXACT:
            return exact.attn_prefill(fmt, pages, open_k, open_v, spans, q, k, v)
        return prefill.attn_prefill(fmt, layer, pages, open_k, open_v, spans, q, k, v)

    def attn_decode(
        self, fmt: HackFormat, layer: int, pages: HackPages, open_k: Tensor, open_v: Tensor, spans: Spans, q: Tensor
    ) -> Tensor:
        """Packed codes against the query heads of a group, split over pages, in one launch."""
        check_attention(fmt, pages, open_k, open_v, spans, q, None, None)
        layout.check_records(fmt, pages)
        if fmt.open_page is OpenPage.REQUANTIZE:
            pool, rows, local = self._on_reference(fmt, pages, spans, (open_k, open_v, q))
            return ReferenceKernels().attn_decode(fmt, layer, pool, rows[0], rows[1], local, rows[2]).to(self.device)
        if fmt.open_page is OpenPage.EXACT:
            return decode.attn_decode(fmt, pages, open_k, open_v, spans, q, self.workspace)
        at = spans.starts % fmt.page_tokens
        own_k, own_v = (pool[spans.slots, :, at] for pool in (open_k, open_v))
        return prefill.attn_prefill(fmt, layer, pages, open_k, open_v, spans, q, own_k, own_v)

    def new_rows(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int) -> HackPages:
        """Planes `k` and `v`."""
        pages = ReferenceKernels().new_rows(num_pages, num_kv_heads, page_tokens, head_dim)
        return {name: plane.to(self.device) for name, plane in pages.items()}

    def attn_rows(
        self,
        pages: HackPages,
        open_k: Tensor,
        open_v: Tensor,
        spans: Spans,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """By torch; `attn_decode_rows` of rows.py is what benchmarks measure, and no engine asks for it yet."""
        return ReferenceKernels().attn_rows(pages, open_k, open_v, spans, q, k, v)

    def _on_reference(
        self, fmt: HackFormat, pages: HackPages, spans: Spans, rows: tuple[Tensor, ...]
    ) -> tuple[HackPages, tuple[Tensor, ...], Spans]:
        """What a batch reads, on the processor: pages in the reference's order, rows, and spans that name them."""
        ids, places = torch.unique(spans.table, return_inverse=True)
        pool = layout.to_wire(fmt, {name: plane[ids].cpu() for name, plane in pages.items()})
        starts, counts, offsets, slots = (t.cpu() for t in (spans.starts, spans.counts, spans.offsets, spans.slots))
        local = Spans(starts, counts, offsets, places.view_as(spans.table).cpu(), slots)
        return pool, tuple(t.cpu() for t in rows), local


def create() -> HackKernels:
    """On the current GPU, or on the processor under TRITON_INTERPRET=1. Raises `BackendUnavailable` with the reason."""
    chosen = os.environ.get(PREFILL_VARIABLE) or Prefill.HOMOMORPHIC
    if chosen not in list(Prefill):
        raise BackendUnavailable(f"{PREFILL_VARIABLE} is {chosen!r}; it must be one of {', '.join(Prefill)}")
    if triton.knobs.runtime.interpret:
        return TritonKernels(torch.device("cpu"), Prefill(chosen))
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if reason := missing(device):
        raise BackendUnavailable(f"{reason} (TRITON_INTERPRET=1 runs the kernels without a GPU, slowly)")
    return TritonKernels(device, Prefill(chosen))
