"""Codec `fp16`: the uncompressed disaggregated baseline over the same seams. Pages are FP16 rows; attention is exact.

The arithmetic is `attn_rows` of `hack_kernels`; this file maps batches to kernel calls.
"""

from __future__ import annotations

import torch
from hack_kernels.base import HackKernels
from torch import Tensor

from hackkv.codec import Batch, LayerPages, PageFormat, Plane
from hackkv.codecs.paged import PagedCodec, filled_pages


class Fp16Codec(PagedCodec):
    """Implements `KvCodec`; planes `k` and `v`, each [Π, D] float16 per page and KV head."""

    def __init__(self, name: str, head_dim: int, page_tokens: int, kernels: HackKernels) -> None:
        super().__init__()
        self.name = name
        self.kernels = kernels
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
        shape = (num_kv_heads, self.format.page_tokens, self.format.head_dim)
        open_k, open_v = (torch.zeros((num_slots, *shape), dtype=torch.float16) for _ in range(2))
        return LayerPages(self.kernels.new_rows(num_pages, *shape), open_k, open_v)

    def seal(self, layer: int, pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Copy the filled pages; there is nothing to quantize."""
        page_ids = torch.tensor([page.page_id for page in batch.filled])
        pool.planes["k"][page_ids], pool.planes["v"][page_ids] = filled_pages(pool, batch, k, v)

    def prefill(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact attention of a chunk."""
        return self.kernels.attn_rows(pool.planes, pool.open_k, pool.open_v, batch.where, q, k, v)

    def decode(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor) -> Tensor:
        """Exact attention of one row per sequence."""
        return self.kernels.attn_rows(pool.planes, pool.open_k, pool.open_v, batch.where, q)

    def to_wire(self, pool: LayerPages, page_ids: Tensor) -> dict[str, Tensor]:
        """Rows as they rest."""
        return {name: plane[page_ids].transpose(0, 1).contiguous() for name, plane in pool.planes.items()}

    def from_wire(self, pool: LayerPages, page_ids: Tensor, planes: dict[str, Tensor]) -> None:
        """Copy rows into the pool."""
        for name, plane in planes.items():
            pool.planes[name][page_ids] = plane.transpose(0, 1)
