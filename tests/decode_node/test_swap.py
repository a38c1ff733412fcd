"""Swapped KV comes back bit-exactly, for every codec of `CODECS`, to other pages and another slot."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.base import Pool
from torch import Tensor

from decode_node.pages import Grant
from hackkv.codecs import CODECS
from hackkv.model.runner import ModelRunner
from tests.pair import PI, tiny_worker

OLD, NEW = Grant((3, 0, 5), 2), Grant((1, 4, 2, 6), 0)


def randomized(pools: tuple[Pool, ...]) -> None:
    """Fill the pools with random bytes."""
    generator = torch.Generator().manual_seed(1)
    for pool in pools:
        for tensor in (*pool.planes.values(), pool.open_k, pool.open_v):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, for comparisons: NaN differs from itself."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.grid
@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("rest", [0, 1, PI - 1])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_round_trip_is_bit_exact_and_touches_nothing_else(codec: str, rest: int, pages: int) -> None:
    worker = tiny_worker(codec)
    runner = ModelRunner(worker.model, worker.codec, 7, 3)
    memory, rows = runner.memory, pages * PI + rest
    randomized(memory.pools)
    before = [[plane.clone() for plane in pool.planes.values()] for pool in memory.pools]
    slots = [(pool.open_k.clone(), pool.open_v.clone()) for pool in memory.pools]
    kv = memory.copy_out(OLD.pages[:pages], OLD.slot, rows)
    tensors = [x for layer in (*kv.sealed, kv.exact) for planes in layer for x in planes.values()]
    size = sum(x.numel() * x.itemsize for x in tensors)
    assert size == memory.footprint.resting_bytes(rows) <= memory.footprint.most_bytes(rows)
    memory.copy_back(kv, NEW.pages, NEW.slot)
    kept = [row for run in worker.codec.window.runs(rows, PI) for row in range(run.start, run.stop)]
    for pool, planes, exact in zip(memory.pools, before, slots, strict=True):
        for now, old in zip(pool.planes.values(), planes, strict=True):
            assert torch.equal(raw(now[list(NEW.pages[:pages])]), raw(old[list(OLD.pages[:pages])]))
            others = [page for page in range(7) if page not in NEW.pages[:pages]]
            assert torch.equal(raw(now[others]), raw(old[others]))
        for now, old in zip((pool.open_k, pool.open_v), exact, strict=True):
            others = [row for row in range(now.shape[2]) if row not in kept]
            assert torch.equal(raw(now[NEW.slot][:, kept]), raw(old[OLD.slot][:, kept]))
            assert torch.equal(raw(now[NEW.slot][:, others]), raw(old[NEW.slot][:, others]))
            assert torch.equal(raw(now[1:]), raw(old[1:]))
