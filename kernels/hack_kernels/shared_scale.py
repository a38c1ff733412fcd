"""Centred codes whose scale all KV heads of a layer share, row by row, as in CacheGen's code.

Planes are those of `GroupFormat`; each head's scales are the same numbers. A process that seals must hold all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hack_kernels.base import PageFormat, PageKernels, Planes, Pool, Rows, Spans
from hack_kernels.check import check_seal
from hack_kernels.group_format import GroupFormat
from hack_kernels.reference.groups import centred_planes


class SharedScaleKernels:
    """Implements `PageKernels` over the kernels of a `GroupFormat` with centred codes, which do everything but seal."""

    def __init__(self, fmt: GroupFormat, below: PageKernels, kv_heads: int) -> None:
        """`kv_heads` is the model's number of KV heads."""
        self._fmt, self._below, self._kv_heads = fmt, below, kv_heads

    @property
    def served_by(self) -> str:
        """The name of the backend that attends."""
        return self._below.served_by

    @property
    def approximation_s(self) -> float:
        """The time that the kernels below report."""
        return self._below.approximation_s

    def new_planes(self, formats: Sequence[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        """The planes of the kernels below."""
        return self._below.new_planes(formats, num_pages, num_kv_heads)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """A row's scale is the largest magnitude that any head has in it. Raises `ValueError` if a head is missing."""
        check_seal(self._fmt, pool, page_ids, starts, k, v)
        if pool.num_kv_heads != self._kv_heads:
            raise ValueError(f"{pool.num_kv_heads} of {self._kv_heads} KV heads: a scale is that of all (faithful)")
        planes: Planes = {}
        for name, rows in (("k", k.transpose(0, 1)), ("v", v.transpose(0, 1))):
            largest = rows.float().abs().amax((0, -1), keepdim=True).expand(*rows.shape[:-1], 1)
            planes |= centred_planes(name, self._fmt.side(name), rows, largest)
        self._below.install(pool, page_ids, {name: plane.contiguous() for name, plane in planes.items()})

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Install by the kernels below."""
        self._below.install(pool, page_ids, planes)

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        """Export by the kernels below."""
        return self._below.export(pool, page_ids)

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        """Attention by the kernels below."""
        return self._below.attend(layer, pool, spans, rows)
