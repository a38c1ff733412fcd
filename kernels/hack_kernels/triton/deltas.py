"""Pages of deltas against anchor rows on a GPU: codec `cachegen-delta`."""

from __future__ import annotations

from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.triton.delta_decode import DeltaLayout, add_delta_pages, delta_layout
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.read_decode import read_decode_launch
from hack_kernels.triton.reading import InRecords


class DeltaTriton(InRecords, DeltaReference):
    """Implements `PageKernels` (`delta_decode.py`)."""

    def layout_of(self, fmt: DeltaFormat) -> DeltaLayout:
        """See `InRecords`."""
        return delta_layout(fmt)

    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """See `InRecords`."""
        layout = delta_layout(self.fmt)
        return read_decode_launch(add_delta_pages, layout, pool, spans, q, out, self._workspace)
