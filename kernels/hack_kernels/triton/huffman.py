"""Pages of Huffman codes on a GPU: codec `kvcomp`."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.huffman_format import HuffmanFormat
from hack_kernels.reference.huffman import HuffmanReference
from hack_kernels.triton.float_query import plain_query
from hack_kernels.triton.huffman_decode import HuffmanLayout, add_huffman_pages, huffman_layout, kernel_tables
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.read_decode import read_decode_launch
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
        layout = huffman_layout(self.fmt)
        return read_decode_launch(
            add_huffman_pages, layout, pool, spans, q, out, self._workspace, self._tables, plain_query
        )
