"""Empty pools: the planes that kernels lay out, the exact rows of sequences in flight, and notes of pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane, Pool

_DONT_NEED: Final[int | None] = getattr(mmap, "MADV_DONTNEED", None)


def new_pool(
    fmt: PageFormat, kernels: PageKernels, device: torch.device, num_pages: int, num_slots: int, heads: range
) -> Pool:
    """An empty pool for KV heads `heads` of one layer."""
    (pool,) = new_pools([fmt], kernels, device, num_pages, num_slots, heads)
    return pool


def new_pools(
    formats: Sequence[PageFormat],
    kernels: PageKernels,
    device: torch.device,
    num_pages: int,
    num_slots: int,
    heads: range,
) -> tuple[Pool, ...]:
    """Empty pools for KV heads `heads` of layers with these formats, each of which has kernels of one class."""
    shapes = [(num_slots, len(heads), fmt.window.pages * fmt.page_tokens, fmt.head_dim) for fmt in formats]
    return tuple(
        Pool(
            planes,
            _zeroed(shape, torch.float16, device),
            _zeroed(shape, torch.float16, device),
            heads.start,
            fmt.window,
        )
        for fmt, shape, planes in zip(formats, shapes, kernels.new_planes(formats, num_pages, len(heads)), strict=True)
    )


def with_notes(pool: Pool, notes: Sequence[Plane]) -> Pool:
    """`pool` with room for `notes` of each page."""
    shape = (pool.num_pages, pool.num_kv_heads)
    return replace(pool, notes={note.name: _zeroed((*shape, *note.shape), note.dtype, pool.device) for note in notes})


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the processor the system gives memory at the first touch, so unused parts take none."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def forget(rows: Tensor, slots: range) -> None:
    """Give the memory of `slots` of `rows` [S, ...] back to the system, as far as the slots fill its pages.

    The slots' contents are lost; the next write takes memory again. Linux, on the processor; elsewhere nothing happens.
    """
    if rows.device.type != "cpu" or _DONT_NEED is None or not rows.is_contiguous():
        return
    at, slot_bytes = rows.data_ptr(), rows[:1].nbytes
    begin = -(-(at + slots.start * slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (at + slots.stop * slot_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)
