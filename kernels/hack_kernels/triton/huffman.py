"""Pages of Huffman codes on a GPU: codec `kvcomp`."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.huffman_format import HuffmanFormat
from hack_kernels.reference.huffman import HuffmanReference
from hack_kernels.triton.huffman_decode import HuffmanLayout, huffman_decode_launch, huffman_layout, kernel_tables
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.reading import InRecords
from hack_kernels.triton.split import Workspace


class HuffmanTriton(InRecords, HuffmanReference):
    """Implements `PageKernels` (`huffman_decode.py`)."""

    def __init__(self, fmt: HuffmanFormat, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device, workspace)
        self._tables = kernel_tables(fmt, device)

    def layout_of(self, fmt: HuffmanFormat) -> HuffmanLayout:
        """See `InRecords`."""
        return huffman_layout(fmt)

    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """See `InRecords`."""
        return huffman_decode_launch(self.fmt, pool, spans, q, out, self._workspace, self._tables)
