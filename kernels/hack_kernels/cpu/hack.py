"""Pages of codes. They rest in the order that the vector unit wants (csrc/hack_format.h); `install` and `export`
convert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_install, check_seal
from hack_kernels.cpu.attention import attend, span_tensors
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.memory import zeroed_planes
from hack_kernels.hack_format import SUM_PLANES, Arithmetic, HackFormat, OpenPage, Rounding


class HackCpu:
    """Implements `HackKernels`."""

    served_by = "cpu"

    def __init__(self, fmt: HackFormat, native: Any) -> None:
        self.fmt = fmt
        self.approximation_s = 0.0  # the correction terms are fused into the products; they have no time of their own
        self._native = native
        self._native_format = native_format(fmt)

    def new_planes(self, num_pages: int, num_kv_heads: int) -> Planes:
        """In huge pages where the system has them."""
        return zeroed_planes(self.fmt, num_pages, num_kv_heads)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool, in native order."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._native.seal(self._native_format, layer, pool.planes, *rows, pool.head_start)

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        """In native order: old K rows are not touched, and V passes through FP16 in scratch memory."""
        rows = (k.contiguous(), v.contiguous())
        where = (span_tensors(spans), *rows, pool.head_start)
        self._native.requantize(self._native_format, layer, pool.planes, *where)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Wire order to native order; absent sums are counted."""
        check_install(self.fmt, pool, page_ids, planes)
        if not all(name in planes for name in SUM_PLANES):
            planes = {name: plane for name, plane in planes.items() if name not in SUM_PLANES}
        wire = {name: plane.contiguous() for name, plane in planes.items()}
        if _is_whole(pool):
            self._native.install(self._native_format, pool.planes, page_ids.contiguous(), wire)
            return
        count = page_ids.numel()
        local = self.new_planes(count, pool.num_kv_heads)
        self._native.install(self._native_format, local, torch.arange(count), wire)
        for name, plane in pool.planes.items():
            plane[page_ids] = local[name]

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Native order to wire order."""
        planes, count = pool.planes, page_ids.numel()
        if not _is_whole(pool):
            planes = {name: plane[page_ids].contiguous() for name, plane in planes.items()}
            page_ids = torch.arange(count)
        wire = {
            plane.name: torch.empty((pool.num_kv_heads, count, *plane.shape), dtype=plane.dtype)
            for plane in self.fmt.planes
        }
        self._native.export(self._native_format, planes, page_ids.contiguous(), wire)
        return wire

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode reads packed codes as they lie; many queries unpack a page once per block of them."""
        return attend(self._native, self._native_format, layer, pool, spans, rows)


def _is_whole(pool: Pool) -> bool:
    """False for a view of some KV heads of a pool, which C++ does not take: its pages are handled in a copy."""
    return pool.planes["k_codes"].is_contiguous()


def native_format(fmt: HackFormat) -> Any:
    """`fmt` for C++."""
    return compiled().hack_format(
        head_dim=fmt.head_dim,
        page_tokens=fmt.page_tokens,
        k_bits=fmt.k_bits,
        v_bits=fmt.v_bits,
        k_partition=fmt.k_partition,
        stochastic=fmt.rounding is Rounding.STOCHASTIC,
        asymmetric=fmt.arithmetic is Arithmetic.ASYMMETRIC,
        stored_sums=fmt.stored_sums,
        own_k_codes=fmt.open_page is not OpenPage.EXACT,
        own_v_codes=fmt.open_page is OpenPage.REQUANTIZE,
        seed=fmt.seed,
    )
