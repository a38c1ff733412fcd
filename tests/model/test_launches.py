"""A whole step on the Triton backend without a GPU: its launches, their arguments, and no value read back.

The device is `meta` (`tests/meta.py`), and each launch is inspected instead of run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from hack_kernels.triton.backend import TritonBackend, TritonRows
from hack_kernels.triton.head_rotation import rotate_heads_kernel, rotate_rows_kernel
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.paged import decode_kernel
from hack_kernels.triton.reading import InRecords
from hack_kernels.triton.row_ops import append_kernel, gate_kernel, norm_kernel, rotate_kernel
from hack_kernels.triton.rows import rows_kernel
from hack_kernels.triton.split import LARGE_BATCH
from torch import Tensor

from decode_node.engine import DecodeEngine
from hackkv.batch import Span
from hackkv.codec import KvCodec
from hackkv.codecs import beneath
from hackkv.codecs.paged import PagedCodec
from hackkv.config import CodecConfig
from hackkv.model import runner as runner_module
from hackkv.model.graphs import recordable
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from tests.meta import META, NothingComesBack, later, on_device, on_meta, two_sequences
from tests.on_triton import codec_on, compiled_for, served
from tests.pair import PI, prompt, tiny_worker


class MetaDeviceRows(TritonRows):
    """Row kernels that choose token 7, after all operations of a device."""

    def back(self, found: Tensor) -> list[Any]:
        on_device(found)
        values: list[Any] = np.full(found.shape, 7).tolist()
        return values


@contextmanager
def checked_launches() -> Iterator[list[Launch]]:
    """Collect launches. Asserts that every tensor is on the device and aligned to 16 bytes: for other alignments Triton
    compiles another kernel, which takes seconds."""
    launched = list[Launch]()

    def look(launch: Launch) -> None:
        tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
        on_device(*tensors)
        assert all(tensor.storage_offset() * tensor.itemsize % 16 == 0 for tensor in tensors)
        assert all(side > 0 for side in launch.grid)
        launched.append(launch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Launch, "run", look)
        yield launched


ROW_KERNELS = (append_kernel, gate_kernel, norm_kernel, rotate_kernel, rotate_heads_kernel, rotate_rows_kernel)
"""Kernels that a step launches besides attention and seals."""

COSTLESS = {"empty", "empty_like", "new_empty", "select", "slice", "split_with_sizes", "view"}
"""Operators after which a device has nothing to do."""


def on_pages(launches: Iterable[Launch]) -> Counter[object]:
    """Key of compilation -> number of launches, for kernels of pages."""
    return Counter(compiled_for(launch) for launch in launches if launch.kernel not in ROW_KERNELS)


SERVED = served()
OF_ROWS = [name for name in SERVED if beneath(CodecConfig(name=name)) == "fp16"]
"""Codecs whose pages are FP16 rows."""


def runner_on_triton(name: str, slots: int = 3, recorded: int = 0) -> ModelRunner:
    """A runner with a tiny model."""
    backend, model = TritonBackend(META), tiny_worker("fp16").model
    backend.rows = MetaDeviceRows()
    codec = codec_on(backend, name)
    llama = Llama(model.spec, on_meta(model.weights, torch.bfloat16), kernels=backend.rows)
    return ModelRunner(llama, codec, 8, slots, recorded=recorded)


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("name", SERVED)
def test_a_decode_step_launches_on_its_device_and_reads_nothing_back(name: str) -> None:
    """In the second of three steps one sequence fills a page. All steps call the same kernels the same way, and the
    keys of compilation do not change with lengths and pages."""
    runner, parts, steps = runner_on_triton(name), two_sequences(), list[Counter[object]]()
    engine, operators = DecodeEngine(runner), list[int]()
    for _ in range(3):
        with checked_launches() as launched, NothingComesBack() as watch, torch.inference_mode():
            engine.step(parts)
        attending = on_pages(launched)
        steps.append(Counter(map(compiled_for, launched)))
        operators.append(len(watch.operators))
        parts = later(parts)
    assert len(attending) == len(set(runner.codec.formats)), "layers of one format are alike"
    assert steps[2] == steps[0]
    assert steps[1] >= steps[0]
    if name in OF_ROWS:
        return
    seals = operators[1] > operators[0] if sealed_by_operators(runner.codec) else steps[1] > steps[0]
    assert seals, "a step that fills a page seals it"


def sealed_by_operators(codec: KvCodec) -> bool:
    """Whether the definition seals pages that kernels attend to."""
    return isinstance(codec, PagedCodec) and any(type(kept.kernels).seal is InRecords.seal for kept in codec.layers)


class Again:
    """Implements `Recorder` on a device without values: to record is to run."""

    queues = True

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def test_all_that_has_kernels_is_recorded_but_what_chooses_pages() -> None:
    assert [name for name in SERVED if not recordable(runner_on_triton(name).codec, torch.bfloat16)] == ["mpcache"]


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("name", SERVED)
def test_a_recorded_step_takes_one_copy_to_the_device_and_reads_nothing_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same three steps as above make the launches that were recorded."""
    monkeypatch.setattr(runner_module, "recorder_on", lambda device, kernels: Again())
    engine, parts = DecodeEngine(runner_on_triton(name, recorded=3)), two_sequences()
    with checked_launches() as recorded, NothingComesBack(into_place=True):
        engine.record()
    compiled, copies = set(map(compiled_for, recorded)), list[int]()
    for _ in range(3):
        with checked_launches() as launched, NothingComesBack(into_place=True) as watch, torch.inference_mode():
            engine.step(parts)
        assert launched
        assert not recorded or set(map(compiled_for, launched)) <= compiled
        copies.append(watch.brought)
        parts = later(parts)
    assert copies == ([1, 1, 1] if recordable(engine._runner.codec, torch.bfloat16) else [0, 0, 0])


@pytest.mark.parametrize("name", ["fp16", "hack", "rot-k3v2"])
def test_a_layer_is_four_products_and_a_launch_for_each_operation_between_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step of few rows takes the time of its launches, so each one counts."""
    monkeypatch.setattr(runner_module, "recorder_on", lambda device, kernels: Again())
    runner = runner_on_triton(name, recorded=3)
    with checked_launches():
        runner.record()
    graphs, layers = runner._graphs, runner.model.spec.num_layers
    assert graphs is not None
    with checked_launches() as launched, NothingComesBack(into_place=True) as watch, torch.inference_mode():
        graphs._step(3)
    attend = rows_kernel if name == "fp16" else decode_kernel
    each = [append_kernel, attend, gate_kernel, norm_kernel, norm_kernel, rotate_kernel]
    each += [rotate_rows_kernel] * (name == "rot-k3v2")
    assert Counter(launch.kernel for launch in launched) == Counter([*each * layers, norm_kernel])
    computing = Counter(name for name in watch.operators if name.split(".")[1] not in COSTLESS)
    assert computing.pop("aten.index_select.default") == 2, "rows of the embedding, and of the rotary embedding's table"
    assert computing.pop("aten.linear.default") == 4 * layers
    assert computing == ({"aten.to.dtype": layers} if name == "rot-k3v2" else {}), "outputs of attention are rounded"


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("name", SERVED)
def test_what_a_step_does_follows_from_its_size_and_the_pages_that_it_fills(name: str) -> None:
    """Lengths and tables change no operator and no kernel. So a graph can be captured, and a growing sequence never
    makes Triton compile, which takes seconds. Triton distinguishes tables by whether 16 divides the stride of rows."""
    runner, done = runner_on_triton(name), list[tuple[object, ...]]()
    states = [part.sequence.sampler for part in (*two_sequences(), *two_sequences()[:1])]
    for pages in (9, 1, 16, 33):
        spans = [Span(slot, 3 + slot + pages // 2 * PI, 1, tuple(range(pages))) for slot in range(3)]
        with checked_launches() as launched, NothingComesBack() as watch, torch.inference_mode():
            runner.choose(spans, [5] * len(spans), states)
        done.append((*watch.operators, *map(compiled_for, launched)))
        assert len(on_pages(launched)) == len(set(runner.codec.formats))
    assert len(set(done[1:])) == 1, "the first step takes the memory that all of them share"


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("name", SERVED)
def test_batches_of_any_size_run_what_is_compiled(name: str) -> None:
    """Triton takes seconds to compile. A single sequence has separate kernels; all other batches share theirs."""
    compiled = list[set[object]]()
    for size in (1, 2, 3, 16, 17, LARGE_BATCH):
        runner = runner_on_triton(name, slots=size)
        states = [two_sequences()[0].sequence.sampler] * size
        spans = [Span(slot, PI + 1 + slot % 7, 1, (2 * slot, 2 * slot + 1)) for slot in range(size)]
        with checked_launches() as launched, NothingComesBack(), torch.inference_mode():
            runner.choose(spans, [5] * size, states)
        compiled.append(set(map(compiled_for, launched)))
    assert all(kernels == compiled[1] for kernels in compiled[1:])
    assert len(compiled[0] | compiled[1]) <= 2 * len(compiled[1])


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("name", SERVED)
def test_passes_of_any_prompts_run_what_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of prompts and pages. A single prompt has separate kernels, and so has the rotation of
    many rows."""
    monkeypatch.setattr(MetaDeviceRows, "set_in", lambda rows, flags: [])
    compiled = list[set[object]]()
    for size in (1, 2, 3, 16, 17):
        runner = runner_on_triton(name, slots=size)
        spans = [Span(slot, 0, 2 * PI + 1 + slot, (0, 1, 2)) for slot in range(size)]
        ids = prompt(2, sum(span.count for span in spans))
        with checked_launches() as launched, NothingComesBack(), torch.inference_mode():
            runner.forward(spans, ids, wanted=[1] * size)
        compiled.append(set(map(compiled_for, launched)))
    known = compiled[1] | compiled[-1]
    assert all(kernels <= known for kernels in compiled[1:])
    assert len(known - compiled[1]) <= 1
    assert len(compiled[0] | known) <= 2 * len(compiled[1]) + 1


@pytest.mark.parametrize("name", SERVED)
def test_a_prefill_pass_launches_on_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass launches on its device and reads nothing back."""
    runner = runner_on_triton(name)
    spans, ids = [Span(0, 0, 2 * PI + 3, (0, 1, 2)), Span(1, 5, PI, (3, 4))], prompt(2, 3 * PI + 3)
    monkeypatch.setattr(MetaDeviceRows, "set_in", lambda rows, flags: [])
    with checked_launches() as launched, NothingComesBack(), torch.inference_mode():
        runner.forward(spans, ids, wanted=[1, 0])
    assert launched
