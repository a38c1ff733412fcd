"""Kernels for pages of levels: checks, then launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool, Rows, Spans
from hack_kernels.check import check_attention, check_install, check_seal
from hack_kernels.level_format import Feedback, LevelFormat, code_planes
from hack_kernels.reference.levels import top_level, unpack_scales
from hack_kernels.triton.dense import CodedSide, attn_dequantized
from hack_kernels.triton.layout import check_layout
from hack_kernels.triton.level_decode import attn_level_decode
from hack_kernels.triton.level_exchange import export_levels, install_levels
from hack_kernels.triton.level_layout import level_layout, new_level_pages
from hack_kernels.triton.level_prefill import level_prompt_reader
from hack_kernels.triton.level_seal import columns_first, seal_levels
from hack_kernels.triton.prefill import attn_prompt
from hack_kernels.triton.split import Workspace

NARROWEST: Final = 64
"""Channels of the smallest heads that are tested; the definition serves others."""


class LevelTriton:
    """Implements `LevelKernels`. A page is one record, whose planes are views (`level_layout.py`)."""

    served_by = "triton"

    def __init__(self, fmt: LevelFormat, device: torch.device, workspace: Workspace, *, dense: bool) -> None:
        """`dense`: prompts read dequantized pages (`dense.py`)."""
        self.fmt, self.device, self._dense = fmt, device, dense
        self.approximation_s = 0.0  # the corrections are one subtraction in each product
        self._workspace = workspace
        self._feedback = dict[int, Feedback]()

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        """Keep the feedback for seals of `layer`, in the order in which the kernel reads it."""
        feedback.check(self.fmt.head_dim)
        self._feedback[layer] = columns_first(feedback.to(self.device))

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Views into one record per page and KV head."""
        return tuple(new_level_pages(cast(LevelFormat, fmt), num_pages, num_kv_heads, self.device) for fmt in formats)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages into the pool in one launch."""
        check_seal(self.fmt, pool, page_ids, starts, k, v)
        self._check(pool)
        if page_ids.numel():
            seal_levels(self.fmt, pool, page_ids, k, v, self._feedback.get(layer))

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Wire order to records."""
        check_install(self.fmt, pool, page_ids, planes)
        self._check(pool)
        if page_ids.numel():
            install_levels(self.fmt, pool.planes, page_ids, planes)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Records to wire order."""
        self._check(pool)
        return export_levels(self.fmt, pool.planes, page_ids)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Decode multiplies INT8 and divides pages among programs. A prompt takes tiles of queries against one page
        after another, in INT8 or FP16."""
        check_attention(self.fmt, pool, spans, rows)
        self._check(pool)
        if rows.k is None or rows.v is None:
            return attn_level_decode(self.fmt, pool, spans, rows.q, self._workspace)
        if self._dense:
            return attn_dequantized(pool, spans, rows, lambda ids: _sides(self.fmt, self.export(pool, ids)))
        reader = level_prompt_reader(self.fmt, rows.q.dtype)
        return attn_prompt(reader, layer, pool, spans, rows.q, rows.k, rows.v)

    def _check(self, pool: Pool) -> None:
        check_layout(level_layout(self.fmt), pool.planes)


def _sides(fmt: LevelFormat, wire: Planes) -> tuple[CodedSide, CodedSide]:
    """K and V of pages in wire order."""
    k, v = (
        CodedSide(
            wire[f"{name}_codes"],
            wire.get(f"{name}_high"),
            unpack_scales(wire[f"{name}_scale"], fmt.scales)[..., None],
            None,
            code_planes(name, bits)[0][1],
            top_level(bits),
            channels_first=name == "v",
        )
        for name, bits in (("k", fmt.k_bits), ("v", fmt.v_bits))
    )
    return k, v
