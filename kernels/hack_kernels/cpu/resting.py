"""Pages whose codes rest in the order that the vector unit needs (csrc/hack_format.h); C++ converts bit-exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Planes, Pool
from hack_kernels.check import check_install
from hack_kernels.cpu.memory import zeroed_planes


class RestingCodes:
    """The part of `PageKernels` that moves pages, for formats whose codes rest in native order."""

    def __init__(self, fmt: PageFormat, native: Any, native_format: Any) -> None:
        """`native` are the compiled kernels, `native_format` is `fmt` as they take it."""
        self.approximation_s = 0.0  # the correction terms are fused into the products; they have no time of their own
        self._fmt = fmt
        self._native = native
        self._native_format = native_format

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Zeroed planes, in huge pages where the system has them."""
        return zeroed_planes(formats, num_pages, num_kv_heads)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Wire order to native order."""
        check_install(self._fmt, pool, page_ids, planes)
        wire = {name: plane.contiguous() for name, plane in planes.items()}
        self._native.install(self._native_format, pool.planes, page_ids.contiguous(), wire)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Native order to wire order."""
        count = page_ids.numel()
        wire = {
            plane.name: torch.empty((pool.num_kv_heads, count, *plane.shape), dtype=plane.dtype)
            for plane in self._fmt.planes
        }
        self._native.export(self._native_format, pool.planes, page_ids.contiguous(), wire)
        return wire
