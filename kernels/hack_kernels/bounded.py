"""Pages of any format with the bounds of their keys beside them: the least and the largest of each channel of K.

Bounds are those of the FP16 rows. They travel, rest and move with the page's other planes, in two rows of head_dim FP16
values. A codec uses them to guess which pages a query will look at, without reading a page (`hackkv.codecs.selecting`).
The kernels below do everything else and never see the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Plane, Planes, Pool, Rows, Spans
from hack_kernels.window import Window

LEAST, MOST = "least_k", "most_k"
BOUNDS: Final = (LEAST, MOST)
"""Planes [D] float16."""


@dataclass(frozen=True, kw_only=True)
class BoundedFormat(PageFormat):
    """The pages of `below`, and their bounds."""

    head_dim: int
    page_tokens: int
    window: Window
    below: PageFormat

    @classmethod
    def over(cls, below: PageFormat) -> BoundedFormat:
        """Pages of `below` with bounds."""
        return cls(head_dim=below.head_dim, page_tokens=below.page_tokens, window=below.window, below=below)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The bounds come last."""
        return (*self.below.planes, *self.bounds)

    @property
    def bounds(self) -> tuple[Plane, ...]:
        """The planes of the bounds."""
        return tuple(Plane(name, torch.float16, (self.head_dim,)) for name in BOUNDS)


class BoundedKernels:
    """Implements `PageKernels` over the kernels of the format below."""

    def __init__(self, fmt: BoundedFormat, below: PageKernels, device: torch.device) -> None:
        self._fmt, self._below, self._device = fmt, below, device

    @property
    def served_by(self) -> str:
        """The name of the backend that computes on the pages."""
        return self._below.served_by

    @property
    def approximation_s(self) -> float:
        """The time that the kernels below report."""
        return self._below.approximation_s

    @property
    def laid_out_by(self) -> type:
        """The class of the kernels below."""
        return type(self._below)

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """The planes below and the bounds, zeroed. The formats below must have kernels of one class, too."""
        bounded = [cast(BoundedFormat, fmt) for fmt in formats]
        below = self._below.new_planes([fmt.below for fmt in bounded], num_pages, num_kv_heads)
        return tuple(
            {**planes, **self._zeroed_bounds(fmt, num_pages, num_kv_heads)}
            for fmt, planes in zip(bounded, below, strict=True)
        )

    def _zeroed_bounds(self, fmt: BoundedFormat, *shape: int) -> Planes:
        return {
            plane.name: torch.zeros((*shape, *plane.shape), dtype=plane.dtype, device=self._device)
            for plane in fmt.bounds
        }

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Seal the pages and note their bounds."""
        self._below.seal(layer, _below(pool), page_ids, starts, k, v)
        pool.planes[LEAST][page_ids], pool.planes[MOST][page_ids] = k.amin(2), k.amax(2)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Install the pages, and keep the bounds that came with them. Raises `ValueError`."""
        self._below.install(_below(pool), page_ids, _pages(planes))
        for name in BOUNDS:
            pool.planes[name][page_ids] = planes[name].transpose(0, 1)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Export the pages, and the bounds as they are."""
        bounds = {name: pool.planes[name][page_ids].transpose(0, 1).contiguous() for name in BOUNDS}
        return {**self._below.export(_below(pool), page_ids), **bounds}

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention by the kernels below."""
        return self._below.attend(layer, _below(pool), spans, rows)


def _below(pool: Pool) -> Pool:
    return replace(pool, planes=_pages(pool.planes))


def _pages(planes: Planes) -> Planes:
    return {name: plane for name, plane in planes.items() if name not in BOUNDS}
