"""All tensors of a step are on the device of the setting, and only the choice of tokens waits for the device.

The device is `meta`, with shapes and no values, so code outside the backend that asks for a value fails. A dispatch
mode refuses copies to the host, and operators that take a CPU tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from decode_node.engine import DecodeEngine
from hackkv.batch import Span
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.model.llama import Llama, Weights
from hackkv.model.runner import ModelRunner
from hackkv.types import Token
from tests.codecs.calibrations import calibration_file
from tests.meta import META, MetaBackend, MetaRows, NothingComesBack, later, on_meta, two_sequences
from tests.pair import PI, prompt, tiny_worker


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
    ("rot-k3v2", {"sink": 1, "recent": 1}),
    ("rot-k4v4", {"exact_layers": 0}),
    ("rot-k3v2", {"scales": "fp8"}),
]
every_codec = pytest.mark.parametrize("runner", EVERY, ids=str, indirect=True)


@pytest.mark.grid(kinds=True)
@every_codec
def test_a_decode_step_waits_for_nothing_but_its_tokens(runner: ModelRunner) -> None:
    """Later steps share memory that the first one has made."""
    engine, parts = DecodeEngine(runner), two_sequences()
    for _ in range(3):
        with NothingComesBack(), torch.inference_mode():
            tokens = engine.step(parts)
        assert [token.token_id for token in tokens if isinstance(token, Token)] == [7, 7]
        parts = later(parts)


@every_codec
def test_a_prefill_pass_asks_once_whether_all_was_finite(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass has whole pages with a rest, and a chunk that goes on inside a page. Only some rows are wanted."""
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
