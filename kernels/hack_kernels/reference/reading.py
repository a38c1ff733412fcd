"""The definition of attention to pages whose values are read one by one: FP32 over dequantized pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.ragged import attention_by_page, held_pages, sequences
from hack_kernels.reference.wire_order import WireOrder

LARGEST_FP16 = 65504.0

ALL_HEADS: Final = slice(None)


class ReadingReference(WireOrder, ABC):
    """`PageKernels` for a `ReadFormat`. A subclass turns rows into planes of codes, and planes into rows."""

    def __init__(self, fmt: ReadFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self._fmt = fmt
        self.approximation_s = 0.0

    @abstractmethod
    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Rows [..., Π, D] FP16 of side "k" or "v" -> its planes [..., *plane shape].

        `heads` are the model's numbers of the KV heads that lie along the axis before the last two of `rows`.
        """

    @abstractmethod
    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """The planes [..., *plane shape] of side "k" or "v" -> rows [..., Π, D] FP32. `heads` as in `quantize`."""

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize all pages at once."""
        check_seal(self._fmt, pool, page_ids, starts, k, v)
        heads = heads_of(pool)
        for name, plane in (self.quantize("k", k, heads) | self.quantize("v", v, heads)).items():
            pool.planes[name][page_ids] = plane

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Queries run page by page, so that each sees its own page in FP16."""
        check_attention(self._fmt, pool, spans, rows)
        out, page_tokens = torch.empty_like(rows.q), self._fmt.page_tokens
        for part in sequences(pool, spans, rows):
            last = (part.start + part.q.shape[0] - 1) // page_tokens
            began = perf_counter()
            sealed = [self._rows(pool, name, part.table, last) for name in ("k", "v")]
            self.approximation_s += perf_counter() - began
            out[part.rows] = attention_by_page(part, sealed, page_tokens)
        return out

    def _rows(self, pool: Pool, name: str, table: Tensor, count: int) -> Tensor:
        """The first `count` pages of a sequence as FP32 rows [count·Π, Hkv, D]."""
        mine = [plane.name for plane in self._fmt.planes if plane.name.split("_")[0] == name]
        held = {plane: held_pages(pool.planes[plane], table, count) for plane in mine}
        rows = self.dequantize(name, held, heads_of(pool))
        if not self._fmt.fused:
            rows = rows.clamp(-LARGEST_FP16, LARGEST_FP16).half().float()
        return rows.transpose(1, 2).flatten(0, 1)


def heads_of(pool: Pool) -> slice:
    """The model's numbers of the pool's KV heads."""
    return slice(pool.head_start, pool.head_start + pool.num_kv_heads)
