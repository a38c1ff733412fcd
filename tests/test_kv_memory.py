"""Exact rows on their way from slot to slot."""

from __future__ import annotations

import pytest
import torch

from hackkv.kv_memory import KvMemory
from tests.pair import PI, tiny_worker


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k3v2"])
def test_what_a_sequence_still_needs_is_copied_and_nothing_else_is_written(codec: str) -> None:
    """So a resume point takes no memory for its open page. The window's ring turns with the pages."""
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
