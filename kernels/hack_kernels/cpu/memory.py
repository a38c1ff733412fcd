"""Memory for pools: zeros in huge pages."""

from __future__ import annotations

import math
import mmap
from typing import Final

import torch

from hack_kernels.base import PageFormat, Planes

HUGE_PAGE_BYTES: Final = 2**21
LINE_BYTES: Final = 64


def zeroed_planes(fmt: PageFormat, num_pages: int, num_kv_heads: int) -> Planes:
    """Zeroed planes [N, Hkv, *shape] in one block of memory, which the system is asked to map in huge pages.

    The planes of a KV page lie far apart. With system pages of 4 KiB, each access to a plane would cost a page-table
    walk. All planes share one block, because in a pool of moderate size a metadata plane is smaller than a huge page.
    """
    shapes = [(num_pages, num_kv_heads, *plane.shape) for plane in fmt.planes]
    sizes = [math.prod(shape) * plane.dtype.itemsize for shape, plane in zip(shapes, fmt.planes, strict=True)]
    if not hasattr(mmap, "MADV_HUGEPAGE") or sum(sizes) < HUGE_PAGE_BYTES:
        return {p.name: torch.zeros(shape, dtype=p.dtype) for p, shape in zip(fmt.planes, shapes, strict=True)}
    lines = [-(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
    whole_pages = -(-sum(lines) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    block = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    pieces = torch.frombuffer(block, dtype=torch.uint8)[: sum(lines)].split(lines)
    return {
        plane.name: piece[:size].view(plane.dtype).view(shape)
        for plane, shape, piece, size in zip(fmt.planes, shapes, pieces, sizes, strict=True)
    }
