"""Passes and steps of a model with real KV in a codec's pages, timed without the node around them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from hack_kernels.base import Planes

from hackkv.batch import Span
from hackkv.framing import FrameWriter
from hackkv.lanes import Departures, Leaving
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.types import Sampling
from hackkv.wire_form import RAW

GREEDY = Sampling(seed=0, max_tokens=8, temperature=0.0, ignore_eos=True)


class Passes:
    """Runs on one `ModelRunner`. Sequence i has slot i and `pages` pages of its own. A run has ended when its function
    returns, on a GPU too."""

    def __init__(self, runner: ModelRunner, pages: int) -> None:
        self._runner, self._pages = runner, pages

    def fill(self, sequences: int, rows: int) -> None:
        """Give sequences 0 to `sequences` - 1 their first `rows` rows."""
        for slot in range(sequences):
            self._forward([self._span(slot, 0, rows)])

    def a_pass(self, start: int, count: int) -> Callable[[], None]:
        """A function that computes `count` tokens of one prompt after its first `start` rows."""
        return lambda: self._forward([self._span(0, start, count)])

    def a_shipped_pass(self, start: int, count: int) -> Callable[[], None]:
        """The same, and the pages that it fills leave layer by layer, as a prefill node sends large layers: exported,
        brought to host memory and cut into frames, which go nowhere."""
        span, memory = self._span(0, start, count), self._runner.memory
        first = start // memory.footprint.page_tokens
        filled = list(span.pages[first : memory.footprint.sealed(start + count)])

        def run() -> None:
            writer = FrameWriter("bench", 0, RAW)
            with memory.lanes.computing(), Departures(memory.lanes) as out:

                def ship(layer: int) -> None:
                    def cut(part: Leaving, planes: Planes) -> None:
                        for _ in writer.frames(layer, first + part.first, [planes], 0):
                            pass

                    memory.lanes.written()
                    out.send(memory.export(layer, filled), cut)

                self._forward([span], ship)

        return run

    def a_step(self, batch: int, context: int) -> Callable[[], None]:
        """A function that computes a token for each of `batch` sequences with `context` rows."""
        spans, model = [self._span(slot, context - 1, 1) for slot in range(batch)], self._runner.model

        def step() -> None:
            states = [SamplerState(GREEDY, (3,), model.spec.eos_ids, kernels=model.kernels) for _ in range(batch)]
            with torch.inference_mode():
                self._runner.choose(spans, [5] * batch, states)

        return step

    def _forward(self, spans: list[Span], on_layer: Callable[[int], None] = lambda _: None) -> None:
        vocab = self._runner.model.spec.vocab
        ids = [(3 + row % 400) % vocab for span in spans for row in range(span.count)]
        with torch.inference_mode():
            self._runner.forward(spans, ids, on_layer, [1] * len(spans))

    def _span(self, slot: int, held: int, count: int) -> Span:
        return Span(slot, held, count, tuple(range(slot * self._pages, (slot + 1) * self._pages)))


def median_s(run: Callable[[], None], repeats: int, least_s: float = 0.0) -> float:
    """Median seconds of a run, after one that warms up: of `repeats` runs, or of more until they sum to `least_s`."""
    run()
    times: list[float] = []
    while len(times) < repeats or sum(times) < least_s:
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return median(times)
