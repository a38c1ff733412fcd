"""The devices that a setting names, the reasons to refuse a GPU, and the KV that fits on one."""

from __future__ import annotations

import importlib
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hack_kernels.base import PageFormat, Rows, Spans
from hack_kernels.float_format import FloatFormat
from hack_kernels.hack_format import HackFormat
from hack_kernels.pools import new_pool
from hack_kernels.row_format import RowFormat
from hack_kernels.triton.support import NO_TRITON, Gpus, gpus
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from app.cluster import Checked
from bench.gpu.shapes import kernels_of
from decode_node.config import DecodeConfig
from hackkv.batch import Span
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig, ModelConfig, load
from hackkv.errors import ConfigError
from hackkv.model import device
from hackkv.model.device import (
    ON_PROCESSOR_BYTES,
    RESERVE,
    DeviceMemory,
    auto_kv_bytes,
    held_bytes,
    memory_of,
    pass_bytes,
    places,
    recorded_bytes,
)
from hackkv.model.graphs import Graphs
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from hackkv.nodes import Busiest
from hackkv.step_input import Spare
from prefill_node.config import PrefillConfig
from tests.meta import META, MetaBackend, on_meta
from tests.pair import PI, prompt, tiny_worker

A100, T4 = ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))
NONE = Gpus("Found no NVIDIA driver on your system.")
TWO, OLD, MIXED = Gpus(found=(A100, A100)), Gpus(found=(T4,)), Gpus(found=(T4, A100))
BARE = Gpus(found=(A100,), triton=False)

PLACES = [
    ("auto", "auto", NONE, ("cpu",)),
    ("auto", "auto", TWO, ("cuda:0", "cuda:1")),
    ("auto", "auto", OLD, ("cpu",)),
    ("auto", "auto", BARE, ("cpu",)),
    ("auto", "auto", MIXED, ("cuda:1",)),
    ("auto", "cpu", TWO, ("cpu",)),
    ("auto", "reference", TWO, ("cpu",)),
    ("cuda", "auto", TWO, ("cuda:0", "cuda:1")),
    ("cuda", "auto", NONE, ("cuda:0",)),
    ("cuda:1", "triton", TWO, ("cuda:1",)),
    ("cpu", "auto", TWO, ("cpu",)),
]


@pytest.mark.parametrize(("setting", "backend", "seen", "expected"), PLACES, ids=str)
def test_a_setting_means_these_devices(
    setting: str, backend: str, seen: Gpus, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpus", lambda: seen)
    assert places(ModelConfig(device=setting, backend=backend)) == expected


def test_auto_says_why_it_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "gpus", lambda: OLD)
    places(ModelConfig())
    assert "model.device: auto takes the processor: Tesla T4 has compute capability 7.5" in caplog.text


MISSING = [
    (NONE, 0, "torch sees no CUDA device: Found no NVIDIA driver"),
    (TWO, 2, "torch sees no CUDA device cuda:2, but 2 (CUDA_VISIBLE_DEVICES chooses them)"),
    (OLD, 0, "Tesla T4 has compute capability 7.5; the kernels need 8.0"),
    (BARE, 0, NO_TRITON),
]


@pytest.mark.parametrize(("seen", "index", "reason"), MISSING, ids=str)
def test_a_gpu_that_cannot_serve_is_refused_with_what_is_missing(seen: Gpus, index: int, reason: str) -> None:
    assert reason in (seen.missing(index) or "")
    assert f"cuda:{index}" not in seen.usable


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpus() == Gpus(f"torch {torch.__version__} is built without CUDA")


def test_what_torch_says_of_a_driver_is_passed_on_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 1).\nPlease update it.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert gpus() == Gpus("The NVIDIA driver on your system is too old (found version 1).")


def test_every_visible_gpu_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: (T4, A100)[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (T4, A100)[index][1])
    assert gpus().found == (T4, A100)


def test_on_a_gpu_auto_takes_triton_or_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"model\.backend: triton: .*cuda:99"):
        device.backend_on("auto", "cuda:99")


@given(nodes=st.integers(1, 12), devices=st.integers(1, 8))
def test_nodes_take_turns_and_know_how_many_share_their_device(nodes: int, devices: int) -> None:
    names = tuple(f"cuda:{index}" for index in range(devices))
    placed = [Checked("", "", None, names).placed(node, nodes) for node in range(nodes)]
    taken = [name for name, _ in placed]
    assert len(set(taken)) == min(nodes, devices)
    assert all(taken.count(name) == count for name, count in placed)
    assert max(map(taken.count, set(taken))) - min(map(taken.count, set(taken))) <= 1


@given(
    total=st.integers(1 << 30, 1 << 38),
    nodes=st.lists(st.tuples(st.integers(0, 1 << 34), st.integers(0, 1 << 32)), min_size=1, max_size=4),
    others=st.integers(0, 1 << 34),
    data=st.data(),
)
def test_nodes_of_one_gpu_never_take_more_than_there_is(
    total: int, nodes: list[tuple[int, int]], others: int, data: st.DataObject
) -> None:
    """Each node has loaded its weights before any asks. They ask in any order, between allocations of other nodes. A
    single node takes all memory except the reserve."""
    taken = others + sum(weights for weights, _ in nodes)
    for weights, work in nodes:
        unseen = data.draw(st.integers(0, taken), "not yet allocated when it looked")
        found = auto_kv_bytes(DeviceMemory("cuda:0", total, max(0, total - taken + unseen)), weights, work, len(nodes))
        assert found + weights + work <= total * (1 - RESERVE) / len(nodes)
    ((weights, work), *_) = nodes
    alone = auto_kv_bytes(DeviceMemory("cuda:0", total, total - weights), weights, work, 1)
    assert abs(alone + weights + work - total * (1 - RESERVE)) <= 2


class Peak(TorchDispatchMode):
    """Measures the most bytes that tensors made within the mode hold at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor) and x.device == META and id(x.untyped_storage()) not in given:
                self._hold(x.untyped_storage())
        return out

    def _hold(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.bytes += storage.nbytes()
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._let_go, storage.nbytes())

    def _let_go(self, count: int) -> None:
        self.bytes -= count


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k4v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_takes_less_than_is_put_aside_for_it(codec: str, dtype: torch.dtype) -> None:
    """The pass has three pages, and all rows are scored. The bound is not more than a few times the real size."""
    model, backend = tiny_worker("fp16").model, MetaBackend()
    made = make_codec(CodecConfig(name=codec, settings={"page_tokens": PI}), model.spec.kv_shape, backend)
    llama = Llama(model.spec, on_meta(model.weights, dtype), kernels=backend.rows)
    runner, rows = ModelRunner(llama, made, 4, 1), 3 * PI
    with torch.inference_mode(), Peak() as peak:
        hidden = runner.forward([Span(0, 0, rows, (0, 1, 2))], prompt(1, rows))
        llama.logits(hidden).double()
    bound = pass_bytes(model.spec, dtype, Busiest(1, rows, rows))
    assert peak.most <= bound <= 12 * peak.most


@pytest.mark.parametrize("fmt", [HackFormat(64, PI), FloatFormat(64, page_tokens=PI), RowFormat(64, PI)], ids=str)
def test_prompts_hold_less_than_is_put_aside_for_them(fmt: PageFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences of three pages add a row each, and the pages of two sequences are held at a time.

    No kernel runs; tensors are allocated as on a GPU. The bound is at most four times what they take.
    """
    triton = pytest.importorskip("hack_kernels.triton.backend")
    monkeypatch.setattr(importlib.import_module("hack_kernels.triton.launch").Launch, "run", lambda launch: None)
    batch, pages = 8, 3
    for module in (importlib.import_module("hack_kernels.triton.dense"), device):
        monkeypatch.setattr(module, "HELD_TOKENS", 2 * pages * PI)
    monkeypatch.setattr("hack_kernels.triton.dense.READ_PAGES", 1)
    spec = replace(tiny_worker("fp16").model.spec, head_dim=fmt.head_dim, max_context=pages * PI)
    kernels = kernels_of(triton.TritonBackend(META, triton.Prefill.DENSE), fmt)
    with META:
        pool = new_pool(fmt, kernels, META, batch * pages, batch, range(spec.num_kv_heads))
        ones, order = torch.ones(batch, dtype=torch.long), torch.arange(batch)
        spans = Spans(2 * PI * ones, ones, order, torch.arange(batch * pages).view(batch, pages), order)
        q, k, v = (torch.zeros(batch, n, 64, dtype=torch.float16) for n in (spec.num_heads, *2 * [spec.num_kv_heads]))
        with Peak() as peak:
            kernels.attend(0, pool, spans, Rows(q, k, v))
    assert peak.most <= held_bytes(spec) <= 4 * peak.most


@pytest.mark.parametrize("codec", ["fp16", "hack", "rot-k4v4"])
def test_recorded_steps_take_less_than_is_put_aside_for_them(codec: str) -> None:
    """The sum includes the largest step, the largest program that seals, and their buffers."""
    model, backend, rows = tiny_worker("fp16").model, MetaBackend(), 24
    made = make_codec(CodecConfig(name=codec, settings={"page_tokens": PI}), model.spec.kv_shape, backend)
    llama = Llama(model.spec, on_meta(model.weights, torch.bfloat16), kernels=backend.rows)
    memory = ModelRunner(llama, made, 4, 1).memory
    with torch.inference_mode(), Peak() as peak:
        graphs = Graphs(llama, made, memory, Spare(3, 0), rows)
        graphs._step(rows)
        graphs._seal(rows)
    spare = memory.footprint.page_bytes + memory.footprint.slot_bytes
    bound = recorded_bytes(model.spec, torch.bfloat16, memory.footprint, rows)
    assert peak.most + spare <= bound <= 12 * (peak.most + spare)


def test_a_node_on_the_processor_takes_what_it_always_took() -> None:
    worker = tiny_worker("fp16")
    for config in (load(DecodeConfig, None), load(PrefillConfig, None)):
        assert config.kv_bytes == "auto"
        busiest = config.busiest("cpu")
        assert worker.auto_kv_bytes(busiest, 1, memory_of(worker.model.device)) == ON_PROCESSOR_BYTES


@pytest.mark.parametrize("wrong", [0, -1, "most"])
def test_kv_bytes_is_a_number_or_auto(wrong: object) -> None:
    with pytest.raises(ConfigError, match="kv_bytes"):
        load(DecodeConfig, None, {"kv_bytes": wrong})


def test_a_worker_takes_what_a_gpu_has_left_or_says_what_takes_it() -> None:
    """The memory for KV is what weights, slots and passes leave, in whole pages."""
    worker, few, many = tiny_worker("fp16"), Busiest(4, 64, 8), Busiest(400, 6400, 800)
    weights, page = worker.model.weights.nbytes, worker.footprint.page_bytes
    memory = DeviceMemory("cuda:0", 2 << 30, (2 << 30) - weights)
    found = [worker.auto_kv_bytes(busiest, 1, memory) for busiest in (few, many)]
    assert page < found[1] < found[0] < memory.free
    assert found[0] - found[1] > 396 * worker.footprint.slot_bytes
    with pytest.raises(ConfigError, match=rf"kv_bytes: auto .* cuda:0 has {2 << 30} bytes for 900 nodes, .*{weights}"):
        worker.auto_kv_bytes(few, 900, memory)
