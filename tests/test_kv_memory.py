"""Exact rows on their way from slot to slot."""

from __future__ import annotations

import mmap

import pytest
import torch

from hackkv.kv_memory import KvMemory
from tests.pair import PI, tiny_worker


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k3v2"])
def test_what_a_sequence_still_needs_is_copied_and_nothing_else_is_written(codec: str) -> None:
    """Thus a resume point takes no memory for its open page. The window's ring turns with the pages."""
    worker = tiny_worker(codec)
    for rows in (0, PI, 2 * PI, 3 * PI, 4 * PI, 7 * PI, 3 * PI + 5):
        memory = KvMemory(worker.codec, worker.layout, 2, 3)
        for pool in memory.pools:
            for exact, sign in ((pool.open_k, 1), (pool.open_v, -1)):
                exact[1] = sign * torch.arange(1, exact.shape[2] + 1)[:, None]
        memory.copy_rows(1, 2, rows)
        runs = worker.footprint.runs(rows)
        for pool in memory.pools:
            for exact in (pool.open_k, pool.open_v):
                wanted = torch.zeros_like(exact[1])
                for run in runs:
                    wanted[:, run] = exact[1, :, run]
                assert torch.equal(exact[2], wanted)
                assert not exact[0].any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="only Linux takes memory back that is mapped")
def test_slots_that_are_forgotten_hold_zeros_and_all_others_what_they_held() -> None:
    """Only pages of the system whose slots are all forgotten become zeros. Other pages stay as they are."""
    worker = tiny_worker("rot-k3v2")
    memory = KvMemory(worker.codec, worker.layout, 2, 16)
    slots = [2, 3, 4, 5, 6, 7, 12]
    for pool in memory.pools:
        for exact in (pool.open_k, pool.open_v):
            exact.fill_(1)
    memory.forget_slots(slots)
    for pool in memory.pools:
        for exact in (pool.open_k, pool.open_v):
            assert exact.data_ptr() % mmap.PAGESIZE == 0
            for number, page in enumerate(exact.view(-1).split(mmap.PAGESIZE // exact.itemsize)):
                whole = slots_of(number, exact[:1].nbytes) <= set(slots)
                assert bool(page.any()) != whole


def slots_of(number: int, slot_bytes: int) -> set[int]:
    """The slots that have bytes in a page of the system."""
    first, last = number * mmap.PAGESIZE, (number + 1) * mmap.PAGESIZE - 1
    return set(range(first // slot_bytes, last // slot_bytes + 1))
