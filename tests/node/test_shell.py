"""What a node's process does before it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hack_kernels.cpu import CpuBackend

from decode_node.config import DecodeConfig
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker
from node.shell import Loaded, worker_for


@pytest.fixture
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_own_threads")
async def test_a_model_loaded_on_one_thread_computes_on_those_of_its_node(tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path / "tiny", Tiny()))
    codec, settings = CodecConfig(name="fp16"), ModelConfig(path=path, backend="cpu", threads=3)
    forked = load_worker(settings.model_copy(update={"threads": 1}), codec)
    node = DecodeConfig(model=settings, codec=codec)
    worker = await worker_for(node, Loaded(settings, codec, forked))
    assert worker is forked
    assert isinstance(worker.backend, CpuBackend)
    assert worker.backend.threads == torch.get_num_threads() == 3
