"""Pages whose values are read one by one on a GPU: what the kernels of all such formats share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention
from hack_kernels.reference.reading import ReadingReference
from hack_kernels.triton.dense import attn_read
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import RecordLayout, check_layout, new_planar_pages
from hack_kernels.triton.paged import rows_of_heads
from hack_kernels.triton.split import Workspace


class InRecords(ReadingReference):
    """Attention of 16-bit queries over pages that rest in records, whose planes travel as they are.

    FP32 queries, which kernels would round, go to the definition, in torch on the device.
    """

    served_by = "triton"

    def __init__(self, fmt: Any, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device)
        self._workspace = workspace

    @abstractmethod
    def layout_of(self, fmt: Any) -> RecordLayout:
        """The layout of a format's pages."""

    @abstractmethod
    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """The launch that attends to the pages with one query a sequence."""

    def prompt(self, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention of a batch with rows k, v: the definition dequantizes pages, in torch, and a kernel attends."""
        return attn_read(self, pool, spans, rows)

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Views into the records."""
        layouts = ((fmt, self.layout_of(fmt)) for fmt in formats)
        return tuple(new_planar_pages(fmt, layout, num_pages, num_kv_heads, self.device) for fmt, layout in layouts)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """The definition quantizes pages, in torch on the device, without waiting for it."""
        check_layout(self.layout_of(self._fmt), pool.planes)
        super().seal(layer, pool, page_ids, starts, k, v)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode takes one launch, without waiting for the device, if queries have 16 bits."""
        if rows.q.dtype.itemsize != 2:
            return super().attend(layer, pool, spans, rows)
        check_attention(self._fmt, pool, spans, rows)
        check_layout(self.layout_of(self._fmt), pool.planes)
        if rows.k is not None and rows.v is not None:
            return self.prompt(pool, spans, rows)
        q = rows_of_heads(rows.q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.decoding(pool, spans, q, out).run()
        return out
