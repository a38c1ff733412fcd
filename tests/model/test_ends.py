"""In the last layer only the rows that are wanted attend (`Batch.ends`). They get what they get among all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hack_kernels import load
from hack_kernels.base import Backend
from torch import Tensor

from hackkv.batch import Span
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from tests.codecs.calibrations import calibration_file
from tests.model.test_placement import EVERY
from tests.pair import PI, prompt, tiny_worker

EACH = 4
"""Pages of a sequence."""
PROMPTS = (PI + 3, 2 * PI, EACH * PI, 5)
"""They end inside a page, with a page, with a page behind any window, and in the first page."""
PASSES = (
    ((0, PI - 2), (1, PI)),
    ((0, 5), (2, 2 * PI + 7), (3, 5)),
    ((1, PI), (2, PI - 8)),
    ((2, PI + 1),),
)
"""(sequence, rows) of each pass: some end prompts, and some end none."""
CLOSE = 1e-5
"""Decode and prefill add in different orders. Relative to the largest value."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A runner, and the rows that each of its passes got from the attention of the last layer."""

    runner: ModelRunner
    queries: list[int]


def counted(name: str, settings: dict[str, Any], backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A runner of a small model, and a list that grows by the rows that each pass gets from the last layer."""
    model = tiny_worker("fp16").model
    shape = model.spec.kv_shape
    if "calibration" in settings:
        file = calibration_file(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        settings = {**settings, "calibration": str(file)}
    codec = make_codec(CodecConfig(name=name, settings={"page_tokens": PI, **settings}), shape, backend)
    llama, queries = Llama(model.spec, model.weights, kernels=backend.rows), list[int]()
    attend = codec.attend

    def counting(layer: int, *given: Any) -> Tensor:
        out: Tensor = attend(layer, *given)
        if layer + 1 == shape.num_layers:
            queries.append(len(out))
        return out

    monkeypatch.setattr(codec, "attend", counting)
    return Counted(ModelRunner(llama, codec, len(PROMPTS) * EACH, len(PROMPTS)), queries)


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "settings"), EVERY, ids=str)
def test_the_last_row_of_a_prompt_is_what_it_is_among_all_rows(
    name: str, settings: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, among = (counted(name, settings, load(backend), monkeypatch) for _ in range(2))
    held = [0] * len(PROMPTS)
    for run in PASSES:
        spans = [Span(at, held[at], count, tuple(range(at * EACH, (at + 1) * EACH))) for at, count in run]
        ids = [token for at, count in run for token in prompt(at, PROMPTS[at])[held[at] : held[at] + count]]
        for at, count in run:
            held[at] += count
        wanted = [int(held[at] == PROMPTS[at]) for at, _ in run]
        found, whole = alone.runner.forward(spans, ids, wanted=wanted), among.runner.forward(spans, ids)
        last = [sum(span.count for span in spans[: at + 1]) - 1 for at, ends in enumerate(wanted) if ends]
        expected = whole[last]
        assert found.shape == expected.shape
        if last:
            assert float((found - expected).abs().max() / expected.abs().max()) < CLOSE
        trims = alone.runner.codec.bytes_follow_tokens and alone.runner.codec.decodes_as_prefill
        assert alone.queries[-1] == (sum(wanted) if trims else len(ids))
        assert among.queries[-1] == len(ids)
    assert held == list(PROMPTS)
    for mine, its in zip(alone.runner.memory.pools, among.runner.memory.pools, strict=True):
        for plane, values in its.planes.items():
            assert torch.equal(mine.planes[plane].view(torch.uint8), values.view(torch.uint8)), plane
        assert torch.equal(mine.open_k, its.open_k)
        assert torch.equal(mine.open_v, its.open_v)
