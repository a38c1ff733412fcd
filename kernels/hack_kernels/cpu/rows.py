"""Pages of FP16 rows, multiplied in FP32, or in BF16 if queries are BF16 and the processor has BF16 products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention
from hack_kernels.cpu.attention import attend
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.memory import zeroed_planes
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import OWN_PAGE_ONLY


class RowCpu(RowReference):
    """Implements `PageKernels` for `RowFormat`: rows are copied as in the definition and attended to in C++."""

    served_by = "cpu"

    def __init__(self, fmt: RowFormat, native: Any) -> None:
        super().__init__(fmt, torch.device("cpu"))
        self._native = native
        self._native_format = native_row_format(fmt)

    @classmethod
    def for_format(cls, fmt: RowFormat, native: Any) -> RowCpu | None:
        """None for a shape that `csrc/rows.h` does not take; it takes the shape of every model that `hack` serves."""
        takes = fmt.page_tokens % 32 == 0 and fmt.page_tokens <= 128 and fmt.head_dim % 16 == 0 and fmt.head_dim <= 256
        return cls(fmt, native) if takes else None

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Planes `k` and `v`, in huge pages where the system has them."""
        return zeroed_planes(formats, num_pages, num_kv_heads)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Strips of rows against blocks of queries, without leaving the cache."""
        check_attention(self.fmt, pool, spans, rows)
        if pool.window != OWN_PAGE_ONLY:
            pool, spans = with_own_pages(pool, spans)
        return attend(self._native, self._native_format, layer, pool, spans, rows)


def with_own_pages(pool: Pool, spans: Spans) -> tuple[Pool, Spans]:
    """Copies of the open pages of `spans`, in slots that hold nothing else.

    C++ takes rows without a window. The other exact pages of a window also rest in the pool, as the same rows.
    """
    pi, own = pool.page_tokens, torch.arange(spans.slots.numel())
    place = pool.window.at(spans.starts, pi) // pi
    k, v = (x.unflatten(2, (-1, pi))[spans.slots, :, place] for x in (pool.open_k, pool.open_v))
    return Pool(pool.planes, k, v, pool.head_start), Spans(spans.starts, spans.counts, spans.offsets, spans.table, own)


def native_row_format(fmt: RowFormat) -> Any:
    """`fmt` for C++."""
    return compiled().row_format(head_dim=fmt.head_dim, page_tokens=fmt.page_tokens)
