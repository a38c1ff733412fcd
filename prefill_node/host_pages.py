"""Sealed pages in host memory: one block of it for each plane, whose places are handed out by number.

Thousands of small tensors that come and go beside the large ones of a pass would leave the allocator's heap in pieces,
and the process would grow. Planes are copied as they rest, so nothing is converted and nothing can round. On a GPU,
this file is where pinned memory and a stream belong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hackkv.codec import LayerPages


class HostPages:
    """A copy of the pools' planes, `num_pages` long. Memory is taken from the system by the first write to a place."""

    def __init__(self, pools: Sequence[LayerPages], num_pages: int) -> None:
        self._pairs = [
            (plane, torch.empty((num_pages, *plane.shape[1:]), dtype=plane.dtype))
            for pool in pools
            for plane in pool.planes.values()
        ]

    def save(self, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages of the pools to places here; no place may be named twice."""
        for plane, copies in self._pairs:
            copies[torch.tensor(places, dtype=torch.int64)] = plane[torch.tensor(pages, dtype=torch.int64)]

    def load(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy places here to pages of the pools."""
        for plane, copies in self._pairs:
            plane[torch.tensor(pages, dtype=torch.int64)] = copies[torch.tensor(places, dtype=torch.int64)]
