"""Calls of the compiled kernels for attention. The binding checks shapes; the GIL is free while C++ computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import Pool, Rows, Spans


def attend(native: Any, fmt: Any, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
    """Attention over `pool`; `fmt` is its page format as C++ takes it."""
    q = rows.q
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        wide = Rows(q.float(), rows.k, rows.v)
        return attend(native, fmt, layer, pool, spans, wide).to(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k, v = rows.k, rows.v
    if k is not None and v is not None:
        k, v = k.contiguous(), v.contiguous()
    opened = (pool.open_k, pool.open_v)
    native.attend(fmt, layer, pool.planes, *opened, span_tensors(spans), q, out, k, v, pool.head_start)
    return out


def span_tensors(spans: Spans) -> tuple[Tensor, ...]:
    """Spans as contiguous tensors: the binding refuses others."""
    return spans.starts, spans.counts, spans.offsets, spans.table, spans.slots
