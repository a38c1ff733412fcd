"""Launches from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hack_kernels.hack_format import HackFormat
from torch._subclasses import FakeTensorMode

from tests.hack_kernels.triton.batches import DecodeBatch, decode_batch

pytest.importorskip("triton")

from hack_kernels.triton.decode import attn_decode
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.split import Workspace

CPU = torch.device("cpu")


def step(batch: DecodeBatch) -> torch.Tensor:
    return attn_decode(batch.fmt, batch.pool, batch.spans, batch.q, Workspace(CPU, 2))


def test_threads_launch_kernels_side_by_side() -> None:
    """An engine decodes while its inbox installs. Without a lock the interpreter would mix up their programs."""
    batches = [decode_batch(HackFormat(64, 32), [40 + 30 * i], heads=1, group=1, seed=i) for i in range(4)]
    alone = [step(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(step, batches))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


class Watched:
    """A kernel that records the GPU on which it is launched, as the context around the launch says."""

    def __init__(self) -> None:
        self.entered: list[torch.device] = []
        self.launched_on: list[torch.device] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.entered.append(device)
        yield
        self.entered.pop()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **_: self.launched_on.append(self.entered[-1] if self.entered else CPU)


def test_a_launch_goes_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of the calling thread does not matter: threads begin on the first GPU."""
    kernel = Watched()
    monkeypatch.setattr(torch.cuda, "device", kernel.on)
    with FakeTensorMode():
        tensors = [torch.empty(3, device=name) for name in ("cuda:1", "cuda:0", "cpu")]
    for tensor in tensors:
        Launch(kernel, (1,), {"size": 3, "x": tensor}, warps=1).run()
    assert kernel.launched_on == [tensor.device for tensor in tensors]
