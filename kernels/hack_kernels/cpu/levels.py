"""Pages of levels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.check import check_seal
from hack_kernels.cpu.attention import attend
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.resting import RestingCodes
from hack_kernels.level_format import LevelFormat


class LevelCpu(RestingCodes):
    """Implements `LevelKernels`."""

    served_by = "cpu"

    def __init__(self, fmt: LevelFormat, native: Any) -> None:
        super().__init__(fmt, native, native_format(fmt, None))
        self.fmt = fmt
        self._sealing: dict[int, Any] = {}
        """Layer -> the format with that layer's feedback."""

    def set_feedback(self, layer: int, gains: Tensor) -> None:
        """Kept transposed: a channel's error goes to consecutive gains."""
        self._sealing[layer] = native_format(self.fmt, gains.mT.contiguous())

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool, in native order."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        rows = (page_ids.contiguous(), starts.contiguous(), k.contiguous(), v.contiguous())
        self._native.seal(self._sealing.get(layer, self._native_format), layer, pool.planes, *rows, pool.head_start)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode reads packed codes as they lie; many queries unpack a page once per block of them."""
        return attend(self._native, self._native_format, layer, pool, spans, rows)


def native_format(fmt: LevelFormat, gains: Tensor | None) -> Any:
    """`fmt` for C++, which borrows `gains` [heads, D, D] and keeps them alive."""
    return compiled().level_format(
        head_dim=fmt.head_dim, page_tokens=fmt.page_tokens, k_bits=fmt.k_bits, v_bits=fmt.v_bits, feedback=gains
    )
