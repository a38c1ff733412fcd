"""Which decode steps are one CUDA graph: the same operators and launches, numbers and places, whatever the batch holds.

No GPU is needed: a tape (`tests/tape.py`) records steps on the Triton backend, interpreted, from the tokens' ids to the
logits. The choice after them is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton")

import torch
from hack_kernels.triton.backend import TritonBackend
from torch import Tensor

from hackkv.batch import Span
from hackkv.model.llama import Attend, Llama
from hackkv.model.runner import ModelRunner
from tests.meta import placed, two_sequences
from tests.on_triton import codec_on
from tests.pair import PI, tiny_worker
from tests.tape import Tape, differences

CPU = torch.device("cpu")
CODECS = ("rot-k3v2", "fp16")


class Taped(Llama):
    """Records what it is asked for."""

    tape = Tape()

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        with self.tape.recording():
            return super().forward(ids, positions, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.tape.recording():
            return super().logits(hidden)


class Steps:
    """Decode steps of sequences that hold any rows, on a tiny model of 16-bit weights, as a GPU has them."""

    def __init__(self, codec: str) -> None:
        backend = TritonBackend(CPU)
        model = tiny_worker("fp16").model
        self.model = Taped(model.spec, placed(model.weights, CPU, torch.bfloat16), kernels=backend.rows)
        self.runner = ModelRunner(self.model, codec_on(backend, codec), 16, 4)

    def tape(self, held: Sequence[int], pages: int = 3) -> Tape:
        """Of a step of as many sequences, each with so many pages."""
        spans = [Span(slot, rows, 1, tuple(range(slot * pages, (slot + 1) * pages))) for slot, rows in enumerate(held)]
        self.model.tape = Tape()
        states = [two_sequences()[0].sequence.sampler for _ in spans]
        with torch.inference_mode():
            self.runner.choose(spans, [5 + rows for rows in held], states)
        return self.model.tape


@pytest.fixture(params=CODECS)
def steps(request: pytest.FixtureRequest) -> Steps:
    found = Steps(request.param)
    found.tape([1, 2])  # takes the memory that all later steps share
    return found


def test_steps_that_fill_no_page_differ_in_the_places_of_their_input_alone(steps: Steps) -> None:
    """Neither lengths nor tokens are numbers of the program; but each step brings its input in memory of its own."""
    assert differences(steps.tape([3, 40]), steps.tape([35, 4])) == {"places"}


def test_a_step_that_fills_a_page_is_another_program(steps: Steps) -> None:
    """The host decides who seals."""
    assert differences(steps.tape([3, 40]), steps.tape([PI - 1, 4])) == {"acts"}
