"""Codec `hack`: KV quantized once, to 2 or 4 bits, and attended to on its codes (HACK, sections 5 and 6).

The page format, the bit order and the arithmetic are those of `hack_kernels`; this file maps batches to kernel calls.
"""

from __future__ import annotations

import torch
from hack_kernels.base import SUM_PLANES, HackFormat, HackKernels, OpenPage
from torch import Tensor

from hackkv.codec import Batch, LayerPages, PageFormat, Plane
from hackkv.codecs.paged import PagedCodec, filled_pages


class HackCodec(PagedCodec):
    """Implements `KvCodec` for one `HackFormat` on one backend."""

    def __init__(self, name: str, fmt: HackFormat, kernels: HackKernels, *, send_sums: bool = False) -> None:
        super().__init__()
        self.name = name
        self.fmt = fmt
        self.kernels = kernels
        self.send_sums = send_sums
        planes = tuple(
            Plane(plane, dtype, shape, on_wire=send_sums or plane not in SUM_PLANES)
            for plane, (shape, dtype) in fmt.plane_specs().items()
        )
        self.format = PageFormat(planes, fmt.page_tokens, fmt.head_dim)

    @property
    def approximation_s(self) -> float:
        """Seconds spent on the correction terms of Eq. (4)."""
        return self.kernels.approximation_s

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Settings of the format; the backend is not among them, since backends agree bit for bit."""
        names = ("page_tokens", "k_bits", "v_bits", "rounding", "arithmetic", "stored_sums", "open_page", "seed")
        values = tuple((f"codec.{name}", str(getattr(self.fmt, name))) for name in names)
        return (("codec", self.name), *values, ("codec.send_sums", str(self.send_sums)))

    def new_layer(self, num_pages: int, num_slots: int, num_kv_heads: int) -> LayerPages:
        """An empty pool for one layer."""
        shape = (num_slots, num_kv_heads, self.fmt.page_tokens, self.fmt.head_dim)
        planes = self.kernels.new_pages(self.fmt, num_pages, num_kv_heads)
        return LayerPages(planes, torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16))

    def sealed_pages(self, tokens: int) -> int:
        """With requantization the last page is codes too, however few rows it holds."""
        begun = self.fmt.open_page is OpenPage.REQUANTIZE
        return -(-tokens // self.fmt.page_tokens) if begun else tokens // self.fmt.page_tokens

    def seals(self, batch: Batch) -> bool:
        """With requantization every row goes into its page's codes."""
        return self.fmt.open_page is OpenPage.REQUANTIZE or super().seals(batch)

    def seal(self, layer: int, pool: LayerPages, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Quantize the pages that the batch fills, or with requantization those it touches, in one kernel call."""
        if self.fmt.open_page is OpenPage.REQUANTIZE:
            self.kernels.requantize(self.fmt, layer, pool.planes, batch.where, k, v)
        else:
            page_ids = torch.tensor([page.page_id for page in batch.filled])
            starts = torch.tensor([page.start for page in batch.filled])
            self.kernels.seal(self.fmt, layer, pool.planes, page_ids, starts, *filled_pages(pool, batch, k, v))

    def prefill(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Homomorphic attention of a chunk."""
        rows = (pool.planes, pool.open_k, pool.open_v, batch.where, q, k, v)
        return self.kernels.attn_prefill(self.fmt, layer, *rows)

    def decode(self, layer: int, pool: LayerPages, batch: Batch, q: Tensor) -> Tensor:
        """Homomorphic attention of one row per sequence."""
        rows = (pool.planes, pool.open_k, pool.open_v, batch.where, q)
        return self.kernels.attn_decode(self.fmt, layer, *rows)

    def to_wire(self, pool: LayerPages, page_ids: Tensor) -> dict[str, Tensor]:
        """Sums stay behind unless `send_sums`: they follow from the codes."""
        planes = self.kernels.export(self.fmt, pool.planes, page_ids)
        return {plane.name: planes[plane.name] for plane in self.format.wire_planes}

    def from_wire(self, pool: LayerPages, page_ids: Tensor, planes: dict[str, Tensor]) -> None:
        """Install sealed pages; the kernels bring them into their own order."""
        self.kernels.install(self.fmt, pool.planes, page_ids, planes)
