"""Memory for pools: a record for each page, in huge pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes

HUGE_PAGE_BYTES: Final = 2**21
LINE_BYTES: Final = 64


def zeroed_planes(formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
    """Zeroed planes [N, Hkv, *shape] of layers with these formats, views of one record for each page, in huge pages
    where the system has them.

    With system pages of 4 KiB, each access to a KV page would cost a page-table walk. A record holds the planes of all
    layers, so the first KV pages touch one huge page, not one for each layer and plane. A plane begins at a cache line.
    """
    specs = [(layer, spec) for layer, fmt in enumerate(formats) for spec in fmt.planes]
    sizes = [num_kv_heads * math.prod(spec.shape) * spec.dtype.itemsize for _, spec in specs]
    ends = list(accumulate(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes))
    records, planes = _zeros(num_pages * ends[-1]).view(num_pages, ends[-1]), tuple(Planes() for _ in formats)
    for (layer, spec), begin, size in zip(specs, (0, *ends), sizes, strict=False):
        rows = records[:, begin : begin + size].view(spec.dtype)
        planes[layer][spec.name] = rows.unflatten(1, (num_kv_heads, *spec.shape))
    return planes


def _zeros(size: int) -> Tensor:
    """Bytes [size], in huge pages if they fill one."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < HUGE_PAGE_BYTES:
        return torch.zeros(size, dtype=torch.uint8)
    block = mmap.mmap(-1, -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)[:size]
