"""A sequence's KV out of the page pools into host memory, and back: the same bytes, in the pools' own order.

Planes are copied as they rest, whatever the codec, so nothing is converted and nothing can round. The rest of a
sequence (its sampler, the tokens it has to run) is host memory anyway. Copies run on a thread of their own beside the
engine's steps; they touch only pages that no step uses. On a GPU, this file is where pinned memory and a stream belong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hackkv.codec import LayerPages
from hackkv.pages import Grant


@dataclass(frozen=True, slots=True)
class HostKv:
    """The KV of one sequence: per layer, its planes [pages, Hkv, ...] and its open rows [Hkv, rows, D] float16."""

    layers: tuple[LayerPages, ...]


def copy_out(pools: Sequence[LayerPages], grant: Grant, pages: int, rows: int) -> HostKv:
    """The first `pages` pages of a grant and the first `rows` rows of its open page."""
    ids = torch.tensor(grant.pages[:pages], dtype=torch.int64)
    return HostKv(
        tuple(
            LayerPages(
                {name: plane.index_select(0, ids) for name, plane in pool.planes.items()},
                pool.open_k[grant.slot, :, :rows].clone(),
                pool.open_v[grant.slot, :, :rows].clone(),
            )
            for pool in pools
        )
    )


def copy_back(pools: Sequence[LayerPages], grant: Grant, kv: HostKv) -> None:
    """Write `kv` to the first pages and the slot of a grant."""
    for pool, layer in zip(pools, kv.layers, strict=True):
        for name, plane in layer.planes.items():
            pool.planes[name].index_copy_(0, torch.tensor(grant.pages[: plane.shape[0]], dtype=torch.int64), plane)
        rows = layer.open_k.shape[1]
        pool.open_k[grant.slot, :, :rows] = layer.open_k
        pool.open_v[grant.slot, :, :rows] = layer.open_v


class Swapper:
    """Runs copies one after another beside the engine. `close` waits for the last."""

    def __init__(self, pools: Sequence[LayerPages]) -> None:
        self._pools = pools
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")

    async def out(self, grant: Grant, pages: int, rows: int) -> HostKv:
        """`copy_out` on the swap thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, copy_out, self._pools, grant, pages, rows)

    async def back(self, grant: Grant, kv: HostKv) -> None:
        """`copy_back` on the swap thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, copy_back, self._pools, grant, kv)

    def close(self) -> None:
        """Let copies end."""
        self._thread.shutdown(wait=True)
