"""Pages of codes with a minimum and a scale for each partition."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_seal
from hack_kernels.cpu.attention import attend, span_tensors
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.resting import RestingCodes
from hack_kernels.hack_format import SUM_PLANES, Arithmetic, HackFormat, OpenPage, Rounding


class HackCpu(RestingCodes):
    """Implements `HackKernels`."""

    served_by = "cpu"

    def __init__(self, fmt: HackFormat, native: Any) -> None:
        super().__init__(fmt, native, native_format(fmt))
        self.fmt = fmt

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool, in native order."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._native.seal(self._native_format, layer, pool.planes, *rows, pool.head_start)

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        """Requantize in native order. Old K rows are not touched; V passes through FP16 in scratch memory."""
        rows = (k.contiguous(), v.contiguous())
        where = (span_tensors(spans), *rows, pool.head_start)
        self._native.requantize(self._native_format, layer, pool.planes, *where)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Wire order to native order; absent sums are counted."""
        if not all(name in planes for name in SUM_PLANES):
            planes = {name: plane for name, plane in planes.items() if name not in SUM_PLANES}
        super().install(pool, page_ids, planes)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Few queries read packed codes as they rest. Many queries unpack a page once per block of queries."""
        return attend(self._native, self._native_format, layer, pool, spans, rows)


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
