"""Pages of integer codes in groups on a GPU: codecs `kivi-*` and `cachegen*`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_seal
from hack_kernels.group_format import GroupFormat
from hack_kernels.read_format import LOW_BITS
from hack_kernels.reference.groups import GroupReference
from hack_kernels.triton.code_tiles import CODE_BITS, padded
from hack_kernels.triton.dense import CodedSide, attn_dequantized
from hack_kernels.triton.group_decode import group_decode_launch
from hack_kernels.triton.group_layout import group_layout
from hack_kernels.triton.group_seal import group_seal_launch
from hack_kernels.triton.layout import check_layout, new_planar_pages
from hack_kernels.triton.paged import rows_of_heads
from hack_kernels.triton.split import Workspace

SMALLEST_GROUP: Final = 16
"""Rows of K and channels of V that decode multiplies at once share a scale."""


class GroupTriton(GroupReference):
    """Implements `PageKernels`: seals, and attention of 16-bit queries, in decode and in prompts.

    FP32 queries, which kernels would round, go to the definition, in torch on the device. Pages rest in records
    (`group_layout.py`), whose planes travel as they are.
    """

    served_by = "triton"

    def __init__(self, fmt: GroupFormat, device: torch.device, workspace: Workspace) -> None:
        super().__init__(fmt, device)
        self._workspace = workspace

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Views into the records."""
        layouts = ((group_layout(cast(GroupFormat, fmt)), fmt) for fmt in formats)
        return tuple(new_planar_pages(fmt, layout, num_pages, num_kv_heads, self.device) for layout, fmt in layouts)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize all pages in one launch."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        check_layout(group_layout(self.fmt), pool.planes)
        if page_ids.numel():
            group_seal_launch(self.fmt, pool, page_ids, k.contiguous(), v.contiguous()).run()

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode takes one launch, without waiting for the device, if queries have 16 bits."""
        if rows.q.dtype.itemsize != 2:
            return super().attend(layer, pool, spans, rows)
        check_attention(self.fmt, pool, spans, rows)
        check_layout(group_layout(self.fmt), pool.planes)
        if rows.k is not None and rows.v is not None:
            return attn_dequantized(pool, spans, rows, lambda ids: _sides(self.fmt, self.export(pool, ids)))
        q = rows_of_heads(rows.q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group_decode_launch(self.fmt, pool, spans, q, out, self._workspace).run()
        return out


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
