"""The definition of attention over uncompressed pages: FP32 through torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.reference.ragged import attention_by_page, exact_attention, held_pages, sequences
from hack_kernels.reference.wire_order import WireOrder
from hack_kernels.row_format import RowFormat


class RowReference(WireOrder):
    """Implements `PageKernels` for `RowFormat`."""

    def __init__(self, fmt: RowFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self.approximation_s = 0.0  # nothing is approximated or dequantized

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy; there is nothing to quantize."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        pool.planes["k"][page_ids], pool.planes["v"][page_ids] = k, v

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Sequence by sequence, in FP32."""
        check_attention(self.fmt, pool, spans, rows)
        out = torch.empty_like(rows.q)
        for part in sequences(pool, spans, rows):
            full = part.start // self.fmt.page_tokens
            if self.fmt.exact:
                held = (self._held(pool, name, part.table, full) for name in ("k", "v"))
                k, v = (torch.cat(each) for each in zip(held, (part.own_k, part.own_v), strict=True))
                out[part.rows] = exact_attention(part.q, k, v, part.start)
            else:
                last = (part.start + part.q.shape[0] - 1) // self.fmt.page_tokens
                sealed = (self._held(pool, name, part.table, last) for name in ("k", "v"))
                out[part.rows] = attention_by_page(part, sealed, self.fmt.page_tokens)
        return out

    def _held(self, pool: Pool, name: str, table: Tensor, count: int) -> Tensor:
        """The first `count` pages of a sequence as rows [count·Π, Hkv, D]."""
        return held_pages(pool.planes[name], table, count).transpose(1, 2).flatten(0, 1)
