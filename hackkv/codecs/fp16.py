"""Codec `fp16`: the uncompressed disaggregated baseline over the same seams. Pages are FP16 rows; attention is exact.

Attention runs in FP32 through torch's `scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hackkv.codec import Batch, LayerPages, PageFormat, Plane
from hackkv.codecs.paged import PagedCodec, filled_pages


class Fp16Codec(PagedCodec):
    """Implements `KvCodec`; planes `k` and `v`, each [Π, D] float16 per page and KV head."""

    def __init__(self, name: str, head_dim: int, page_tokens: int) -> None:
        super().__init__()
        self.name = name
        shape = (page_tokens, head_dim)
        self.format = PageFormat(
            (Plane("k", torch.float16, shape), Plane("v", torch.float16, shape)), page_tokens, head_dim
        )

    @property
    def approximation_s(self) -> float:
        """Nothing is approximated or dequantized."""
        return 0.0

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """The page size is the only setting."""
        return (("codec", self.name), ("codec.page_tokens", str(self.format.page_tokens)))

    def new_layer(self, num_pages: int, num_slots: int, num_kv_heads: int) -> LayerPages:
        """An empty pool for one layer."""
        rows = (num_kv_heads, self.format.page_tokens, self.format.head_dim)
        planes = {plane.name: torch.zeros((num_pages, *rows), dtype=torch.float16) for plane in self.format.planes}
        open_k, open_v = (torch.zeros((num_slots, *rows), dtype=torch.float16) for _ in range(2))
        return LayerPages(planes, open_k, open_v)

    def seal(self, layer: int, pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Copy the filled pages; there is nothing to quantize."""
        if batch.filled:
            page_ids = torch.tensor([page.page_id for page in batch.filled])
            pool.planes["k"][page_ids], pool.planes["v"][page_ids] = filled_pages(pool, batch, k, v)

    def prefill(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sealed pages and open rows from before the batch, then the batch's own rows."""
        out = torch.empty_like(q)
        for span, offset in zip(batch.spans, batch.offsets.tolist(), strict=True):
            rows = slice(offset, offset + span.count)
            before_k, before_v = self._cached(pool, span.pages, span.slot, span.start)
            keys, values = torch.cat((before_k, k[rows])), torch.cat((before_v, v[rows]))
            out[rows] = _exact(q[rows], keys, values, span.start)
        return out

    def decode(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor) -> Tensor:
        """Every row is in the cache already; the page that the row filled is still whole in the open page."""
        out = torch.empty_like(q)
        for i, span in enumerate(batch.spans):
            keys, values = self._cached(pool, span.pages, span.slot, span.start)
            at = span.start % batch.page_tokens
            own_k, own_v = (rows[span.slot, None, :, at] for rows in (pool.open_k, pool.open_v))
            out[i : i + 1] = _exact(q[i : i + 1], torch.cat((keys, own_k)), torch.cat((values, own_v)), span.start)
        return out

    def _cached(self, pool: LayerPages, pages: tuple[int, ...], slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` rows of a sequence, [tokens, Hkv, D] float16."""
        full, rest = divmod(tokens, self.format.page_tokens)
        page_ids = torch.tensor(pages[:full], dtype=torch.int64)
        rows = []
        for name, open_rows in (("k", pool.open_k), ("v", pool.open_v)):
            sealed = pool.planes[name][page_ids].transpose(1, 2).flatten(0, 1)
            rows.append(torch.cat((sealed, open_rows[slot, :, :rest].transpose(0, 1))))
        return rows[0], rows[1]

    def to_wire(self, pool: LayerPages, page_ids: Tensor) -> dict[str, Tensor]:
        """Rows as they rest."""
        return {name: plane[page_ids].transpose(0, 1).contiguous() for name, plane in pool.planes.items()}

    def from_wire(self, pool: LayerPages, page_ids: Tensor, planes: dict[str, Tensor]) -> None:
        """Copy rows into the pool."""
        for name, plane in planes.items():
            pool.planes[name][page_ids] = plane.transpose(0, 1)


def _exact(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal softmax attention: q [n, Hq, D] at positions start.., k, v [start + n, Hkv, D] -> [n, Hq, D]."""
    n, total = q.shape[0], k.shape[0]
    visible = torch.arange(total)[None, :] <= start + torch.arange(n)[:, None]
    queries, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1).to(q.dtype)
