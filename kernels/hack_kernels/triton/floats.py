"""Pages of small floating-point numbers on a GPU: codecs `fp8`, `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.check import check_seal
from hack_kernels.float_format import FloatFormat
from hack_kernels.reference.floats import FloatReference
from hack_kernels.triton.float_decode import float_decode_launch
from hack_kernels.triton.float_layout import FloatLayout, float_layout
from hack_kernels.triton.float_seal import float_seal_launch
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import check_layout
from hack_kernels.triton.reading import InRecords

WIDEST: Final = 128
"""With more channels decode spills (`python -m lab.gpu.inspect`), so the definition serves."""


class FloatTriton(InRecords, FloatReference):
    """Implements `PageKernels` (`float_layout.py`)."""

    def layout_of(self, fmt: FloatFormat) -> FloatLayout:
        """See `InRecords`."""
        return float_layout(fmt)

    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """See `InRecords`."""
        return float_decode_launch(self.fmt, pool, spans, q, out, self._workspace)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize all pages in one launch."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        check_layout(float_layout(self.fmt), pool.planes)
        if page_ids.numel():
            float_seal_launch(self.fmt, pool, page_ids, k.contiguous(), v.contiguous()).run()
