"""Pages of non-uniform levels with outliers aside on a GPU: codecs `kvquant-*`."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.nuq_format import NuqFormat, NuqTables
from hack_kernels.reference.nuq import NuqReference
from hack_kernels.reference.reading import heads_of
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.nuq_decode import NuqLayout, add_nuq_pages, kernel_tables, nuq_layout
from hack_kernels.triton.read_decode import read_decode_launch
from hack_kernels.triton.reading import InRecords
from hack_kernels.triton.split import Workspace


class NuqTriton(InRecords, NuqReference):
    """Implements `NuqKernels` (`nuq_decode.py`)."""

    def __init__(self, fmt: NuqFormat, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device, workspace)
        self._kept = dict[tuple[int, int], Tensor]()
        """First KV head of a pool and the end of its heads -> the tables that kernels read."""

    def calibrate(self, tables: NuqTables) -> None:
        """Keep the tables."""
        super().calibrate(tables)
        self._kept.clear()

    def layout_of(self, fmt: NuqFormat) -> NuqLayout:
        """See `InRecords`."""
        return nuq_layout(fmt)

    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """See `InRecords`."""
        heads = heads_of(pool)
        if (heads.start, heads.stop) not in self._kept:
            poles = self.poles("k"), self.poles("v")
            tables = self.tables if self.fmt.calibrated else None
            self._kept[heads.start, heads.stop] = kernel_tables(self.fmt, poles, tables, heads)
        kept = self._kept[heads.start, heads.stop]
        layout = nuq_layout(self.fmt)
        return read_decode_launch(add_nuq_pages, layout, pool, spans, q, out, self._workspace, kept)
