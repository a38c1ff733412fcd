"""The start of a node's process, before it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hack_kernels.compiler import OnKernel
from hack_kernels.cpu import CpuBackend

from decode_node.config import DecodeConfig
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model import warm
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.warm import call_all
from hackkv.model.worker import Worker, load_worker
from hackkv.types import Role
from node import shell
from node.announcement import read_word
from node.process import Shutdown
from node.shell import Ground, Hosted, Loaded, serve_node, worker_for


@pytest.fixture
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_own_threads")
async def test_a_model_loaded_on_one_thread_computes_on_those_of_its_node(tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path / "tiny", Tiny()))
    codec, settings = CodecConfig(name="fp16"), ModelConfig(path=path, backend="cpu", threads=3)
    of_one_thread = settings.model_copy(update={"threads": 1})
    forked = load_worker(of_one_thread, codec)
    node = DecodeConfig(model=settings, codec=codec)
    worker = await worker_for(node, Loaded(of_one_thread, codec, forked))
    assert worker is forked
    assert isinstance(worker.backend, CpuBackend)
    assert worker.backend.threads == torch.get_num_threads() == 3


class _NoPort(Exception):
    """Raised in place of opening a port, to end the test."""


@pytest.mark.usefixtures("_own_threads")
async def test_what_compiles_on_first_use_has_run_before_a_port_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU backend compiles nothing, so it gets a compiler that lets kernels run. The whole warm-up runs twice."""
    path = str(write_tiny(tmp_path / "tiny", Tiny()))
    codec, settings = CodecConfig(name="hack"), ModelConfig(path=path, backend="cpu", threads=1)
    config, done = DecodeConfig(model=settings, codec=codec, kv_bytes=1 << 20), list[object]()

    class Noting:
        def batches(self, most: int) -> Sequence[int]:
            assert most == config.busiest("cpu").slots
            return 1, 2

        @contextmanager
        def compiling(self, on_kernel: OnKernel) -> Iterator[None]:
            done.append("compiling")
            yield
            done.append("compiled")

    def called(worker: Worker, sizes: Sequence[int]) -> None:
        call_all(worker, sizes)
        done.append(sizes)

    def port(*_: object, **__: object) -> None:
        done.append("port")
        raise _NoPort

    def hosted(ground: Ground[DecodeConfig]) -> AbstractAsyncContextManager[Hosted]:
        raise AssertionError

    monkeypatch.setattr(CpuBackend, "compiler", Noting())
    monkeypatch.setattr(warm, "call_all", called)
    monkeypatch.setattr(shell, "RpcServer", port)
    loaded = Loaded(settings, codec, load_worker(settings, codec))
    with pytest.raises(_NoPort):
        await serve_node(Role.DECODE, hosted, config, Shutdown(), loaded)
    assert done == ["compiling", (1, 2), "compiled", (1, 2), "port"]
    assert all(map(read_word, capsys.readouterr().out.splitlines()))
