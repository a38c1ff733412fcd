"""A launch from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hack_kernels.hack_format import HackFormat

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch

pytest.importorskip("triton")

from hack_kernels.triton.decode import attn_decode, decode_launch
from hack_kernels.triton.split import Workspace

CPU = torch.device("cpu")


def step(batch: DecodeBatch) -> torch.Tensor:
    return attn_decode(batch.fmt, batch.pool, batch.spans, batch.q, Workspace(CPU, 2))


def test_threads_launch_kernels_side_by_side() -> None:
    """An engine decodes while its inbox installs; the interpreter alone would mix up their programs."""
    batches = [decode_batch(HackFormat(64, 32), [40 + 30 * i], heads=1, group=1, seed=i) for i in range(4)]
    alone = [step(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(step, batches))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_a_launch_goes_where_its_tensors_are() -> None:
    batch = decode_batch(HackFormat(64, 32), [3], heads=1, group=1)
    launch = decode_launch(batch.fmt, batch.pool, batch.spans, batch.q, batch.q, Workspace(CPU, 1))
    assert launch.device == CPU
