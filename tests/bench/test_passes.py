"""Passes that are timed do what a prefill node does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hack_kernels.base import Planes

from bench.passes import Passes
from hackkv.framing import FrameWriter
from hackkv.model.runner import ModelRunner
from hackkv.types import KvFrame
from tests.pair import PI, tiny_worker


@pytest.mark.parametrize(("start", "count", "numbers"), [(0, 2 * PI + 3, [0, 1]), (2 * PI, PI, [2]), (PI, PI - 1, [])])
def test_a_shipped_pass_frames_every_page_that_it_fills(
    start: int, count: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, framed = tiny_worker("hack"), dict[int, list[int]]()
    passes, frames = Passes(ModelRunner(worker.model, worker.codec, 4, 1), 4), FrameWriter.frames

    def noted(writer: FrameWriter, layer: int, first: int, layers: list[Planes], exact: int) -> Iterator[KvFrame]:
        framed.setdefault(layer, []).extend(range(first, first + next(iter(layers[0].values())).shape[1]))
        return frames(writer, layer, first, layers, exact)

    if start:
        passes.fill(1, start)
    monkeypatch.setattr(FrameWriter, "frames", noted)
    passes.a_shipped_pass(start, count)()
    assert framed == (dict.fromkeys(range(worker.model.spec.num_layers), numbers) if numbers else {})
