"""Pages that rest in wire order: every definition handles planes this way, whatever their format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hack_kernels.base import DEFINITION, PageFormat, Planes, Pool
from hack_kernels.check import check_install


class WireOrder:
    """Implements `new_planes`, `install` and `export` of `PageKernels`; a definition adds its arithmetic."""

    served_by = DEFINITION

    def __init__(self, fmt: PageFormat, device: torch.device) -> None:
        self.format, self.device = fmt, device

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """Zeroed planes."""
        return tuple(
            {
                plane.name: torch.zeros((num_pages, num_kv_heads, *plane.shape), dtype=plane.dtype, device=self.device)
                for plane in fmt.planes
            }
            for fmt in formats
        )

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Copy; a derived plane that did not travel stays as it was."""
        check_install(self.format, pool, page_ids, planes)
        for name, plane in planes.items():
            pool.planes[name][page_ids] = plane.transpose(0, 1)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Planes in wire order: heads move to the front."""
        return {p.name: pool.planes[p.name][page_ids].transpose(0, 1).contiguous() for p in self.format.planes}
