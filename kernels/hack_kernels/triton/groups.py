"""Pages of integer codes in groups on a GPU: codecs `kivi-*` and `cachegen*`."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.check import check_seal
from hack_kernels.group_format import GroupFormat
from hack_kernels.read_format import LOW_BITS
from hack_kernels.reference.groups import GroupReference
from hack_kernels.triton.code_tiles import CODE_BITS, padded
from hack_kernels.triton.dense import CodedSide, attn_dequantized
from hack_kernels.triton.group_decode import group_decode_launch
from hack_kernels.triton.group_layout import GroupLayout, group_layout
from hack_kernels.triton.group_seal import group_seal_launch
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.layout import check_layout
from hack_kernels.triton.reading import InRecords

SMALLEST_GROUP: Final = 16
"""Rows of K and channels of V that decode multiplies at once share a scale."""


class GroupTriton(InRecords, GroupReference):
    """Implements `PageKernels` (`group_layout.py`)."""

    def layout_of(self, fmt: GroupFormat) -> GroupLayout:
        """See `InRecords`."""
        return group_layout(fmt)

    def decoding(self, pool: Pool, spans: Spans, q: Tensor, out: Tensor) -> Launch:
        """See `InRecords`."""
        return group_decode_launch(self.fmt, pool, spans, q, out, self._workspace)

    def prompt(self, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Pages are dequantized by a kernel."""
        return attn_dequantized(pool, spans, rows, lambda ids: _sides(self.fmt, self.export(pool, ids)))

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize all pages in one launch."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        check_layout(group_layout(self.fmt), pool.planes)
        if page_ids.numel():
            group_seal_launch(self.fmt, pool, page_ids, k.contiguous(), v.contiguous()).run()


def _sides(fmt: GroupFormat, wire: Planes) -> tuple[CodedSide, CodedSide]:
    """K and V of pages in wire order."""
    k, v = (
        CodedSide(
            wire[f"{name}_codes"],
            wire.get(f"{name}_high"),
            wire[f"{name}_scale"],
            wire.get(f"{name}_min"),
            LOW_BITS.get(side.bits, side.bits),
            side.centre,
            1.0 / (side.centre or 1),
        )
        for name, side in (("k", fmt.k), ("v", fmt.v))
    )
    return k, v


def takes_groups(fmt: GroupFormat) -> bool:
    """Whether K and V have codes around zero, or are grouped as in KIVI in widths and groups that kernels support."""
    if fmt.k.centre and fmt.v.centre:
        return True
    return (fmt.k.by_channel, fmt.v.by_channel) == (True, False) and all(
        side.bits in CODE_BITS and not side.centre and side.group == padded(side.group) >= SMALLEST_GROUP
        for side in (fmt.k, fmt.v)
    )
