"""Everything of a step lies on the device that the worker was told, and nothing waits for it but the choice of tokens.

The device is `meta`: it has shapes and no values, so whatever asks for a value outside the backend fails by itself. A
dispatch mode refuses the rest: copies to the host, and operators that take a tensor of the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from hack_kernels.base import FormatT, KernelsT, PageFormat, Planes, Pool, RowKernels, Rows, Spans, Stopwatch
from hack_kernels.choosing import Chooser, Scores
from hack_kernels.level_format import Feedback
from hack_kernels.rowwise import Rowwise
from hack_kernels.stopwatch import HostStopwatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from decode_node.engine import DecodeEngine, Sequence, StepPart
from hackkv.codec import Span
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.model.llama import Llama, Weights
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from tests.codecs.calibrations import calibration_file
from tests.pair import PI, greedy, prompt, tiny_worker

META = torch.device("meta")
ARRIVING = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.lift_fresh, torch.ops.aten.detach)
"""What brings numbers of the host to the device."""


class MetaRows(Rowwise):
    """What reads values answers without them, as a device would after a wait."""

    def choose(
        self, logits: Tensor, choosers: Series[Chooser], faulty: Tensor | None = None, allowed: Tensor | None = None
    ) -> list[int]:
        assert faulty is not None
        assert faulty.shape == logits.shape[:1] == (len(choosers),)
        _on_device(logits, faulty)
        return [7] * len(choosers)

    def score(self, logits: Tensor, ids: Series[int], tops: Series[int]) -> list[Scores]:
        _on_device(logits)
        return [(-1.0, [(token_id, -1.0)] * top) for token_id, top in zip(ids, tops, strict=True)]

    def set_in(self, flags: Tensor) -> list[int]:
        return []


class MetaKernels:
    """Kernels for any format, which look at where their arguments lie."""

    served_by = "meta"
    approximation_s = 0.0

    def __init__(self, fmt: PageFormat) -> None:
        self.fmt = fmt
        self.sealed = 0

    def new_planes(self, num_pages: int, num_kv_heads: int) -> Planes:
        return {
            plane.name: torch.zeros((num_pages, num_kv_heads, *plane.shape), dtype=plane.dtype, device=META)
            for plane in self.fmt.planes
        }

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        _on_device(page_ids, starts, k, v)
        self.sealed += page_ids.numel()

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        _on_device(*(getattr(spans, each.name) for each in fields(spans)), k, v)
        self.sealed += 1

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        _on_device(feedback.gains, feedback.weights)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        _on_device(page_ids, *planes.values())

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        _on_device(page_ids)
        return {name: plane[page_ids].transpose(0, 1).contiguous() for name, plane in pool.planes.items()}

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        _on_device(pool.open_k, pool.open_v, *(getattr(spans, each.name) for each in fields(spans)))
        _on_device(*(x for x in (rows.q, rows.k, rows.v) if x is not None))
        return torch.empty_like(rows.q, memory_format=torch.contiguous_format)


class MetaBackend:
    """Implements `Backend` for a device without values."""

    name = isa = "meta"
    device = META

    def __init__(self) -> None:
        self.rows: RowKernels = MetaRows()
        self.made: list[MetaKernels] = []

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        self.made.append(MetaKernels(fmt))
        return cast(KernelsT, self.made[-1])

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()


def _on_device(*tensors: Tensor) -> None:
    assert {tensor.device for tensor in tensors} == {META}


class NothingComesBack(TorchDispatchMode):
    """Refuses operators that give a value to the host, and those that compute with a tensor of the processor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        name = func.overloadpacket
        assert name is not torch.ops.aten._local_scalar_dense, f"{func} asks for a value"
        out = func(*args, **kwargs)
        made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        if any(x.device == META for x in given):
            # A number that Python made, such as a scalar of a formula, is not a tensor that somebody forgot.
            assert all(x.device == META or x.dim() == 0 for x in (*given, *made)), f"{func} mixes devices"
        elif given:
            arrives = name in ARRIVING
            assert arrives, f"{func} computes on the processor"
        return out


def on_meta(value: Any) -> Any:
    """Tensors of a dataclass of weights, without their values."""
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, tuple):
        return tuple(map(on_meta, value))
    if value is None:
        return None
    return replace(value, **{each.name: on_meta(getattr(value, each.name)) for each in fields(value)})


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    name, settings = request.param
    model = tiny_worker("fp16").model
    backend = MetaBackend()
    shape = model.spec.kv_shape
    if "calibration" in settings:
        settings = {"calibration": str(calibration_file(shape.num_layers, shape.num_kv_heads, shape.head_dim))}
    config = CodecConfig(name=name, settings={"page_tokens": PI, **settings})
    codec = make_codec(config, shape, backend)
    weights: Weights = on_meta(model.weights)
    made = ModelRunner(Llama(model.spec, weights, kernels=backend.rows), codec, 8, 3)
    yield made
    assert sum(kernels.sealed for kernels in backend.made) > 0


EVERY = [
    *((name, {}) for name in sorted(CODECS)),
    ("hack", {"open_page": "requantize"}),
    ("rot-k3v2", {"calibration": True}),
]
every_codec = pytest.mark.parametrize("runner", EVERY, ids=str, indirect=True)


@every_codec
def test_a_decode_step_waits_for_nothing_but_its_tokens(runner: ModelRunner) -> None:
    """One sequence fills a page, one is in the middle of one; the second step shares what the first had made. One is
    greedy, the other asks for all that sampling has."""
    engine, parts = DecodeEngine(runner), list[StepPart]()
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "presence_penalty": 1.0, "logprobs": 2}
    cases: list[tuple[int, dict[str, object]]] = [(PI - 2, {}), (5, {**sampled, "repetition_penalty": 1.1})]
    for slot, (held, settings) in enumerate(cases):
        request = greedy("r", prompt(1, held), 9, **settings)
        sequence = Sequence([5], SamplerState(request.sampling, request.prompt_ids, ()), 0.0)
        parts.append(StepPart(sequence, Span(slot, held, 1, (2 * slot, 2 * slot + 1)), replay=False))
    for _ in range(3):
        with NothingComesBack(), torch.inference_mode():
            tokens = engine.step(parts)
        assert [token.token_id for token in tokens if token is not None] == [7, 7]
        parts = [part._replace(span=replace(part.span, held=part.span.held + 1)) for part in parts]


@every_codec
def test_a_prefill_pass_asks_once_whether_all_was_finite(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages and a rest, beside a chunk that goes on inside a page; only some rows are wanted."""
    asked = list[int]()

    def ask(self: MetaRows, flags: Tensor) -> list[int]:
        asked.append(len(flags))
        return []

    monkeypatch.setattr(MetaRows, "set_in", ask)
    spans = [Span(0, 0, 2 * PI + 3, (0, 1, 2)), Span(1, 5, PI, (3, 4))]
    ids, layers = prompt(2, 3 * PI + 3), list[int]()
    with NothingComesBack(), torch.inference_mode():
        hidden = runner.forward(spans, ids, layers.append, [1, 0])
    assert (layers, hidden.shape[0], hidden.device) == ([0, 1], 1, META)
    assert asked == [2]


def test_the_watch_sees_what_it_should() -> None:
    x, here = torch.ones(3, device=META), torch.ones(3)
    with NothingComesBack():
        for wrong in (lambda: bool(here.all()), lambda: here + 1, lambda: here.sum().item()):
            with pytest.raises(AssertionError):
                wrong()
        for fails in (lambda: x.cpu(), lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[here.long()]):
            with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                fails()
