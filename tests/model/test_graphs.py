"""A recorded decode step is one program for any contents of the batch. Its replay gives the same bytes and tokens as a
newly enqueued step.

No GPU is needed: a tape (`tests/tape.py`) stands in for a CUDA graph. It records steps on the interpreted Triton
backend, from token ids to hidden states, without the choice after them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hackkv.batch import Span
from hackkv.errors import ConfigError, NonFiniteError
from hackkv.model import graphs
from hackkv.model.graphs import fill_sizes, step_sizes
from hackkv.model.llama import Attend, Llama
from hackkv.model.runner import ModelRunner
from tests.pair import PI
from tests.standing import (
    PAGES,
    SLOTS,
    SMALL,
    InvariantRows,
    assert_same_pages,
    assert_same_rows,
    runners,
    spans_of,
    standing,
    states,
    worker_in_16_bits,
)
from tests.tape import Tape, TapeRecorder, differences, on_tape


@pytest.fixture(
    params=["rot-k3v2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "fp8", "mxfp4", "kivi-4"))]
)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def few_sizes(monkeypatch: pytest.MonkeyPatch, steps: int, fills: int) -> None:
    """Record only one size of each kind, since an interpreted recording takes long."""
    monkeypatch.setattr(graphs, "step_sizes", lambda most: [steps])
    monkeypatch.setattr(graphs, "fill_sizes", lambda most: [fills])


def step(runner: ModelRunner, spans: list[Span], ids: list[int]) -> list[int]:
    with torch.inference_mode():
        return [token.token_id for token in runner.choose(spans, ids, states(len(spans)))]


def test_a_step_is_one_program_whatever_it_holds(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program does not contain lengths, tokens, page numbers, which pages fill, or the number of unused rows."""
    few_sizes(monkeypatch, 2, 2)
    tapes = list[Tape]()
    both = runners(codec, PI, 2)
    tapes += both.recorder.tapes
    step(both.recorded, spans_of(PI - 1), [7])
    recorder = TapeRecorder()
    assert both.recorded._graphs is not None
    both.recorded._graphs.record(recorder)
    tapes += recorder.tapes
    assert len(tapes) == 4
    assert differences(tapes[0], tapes[2]) == differences(tapes[1], tapes[3]) == set()


class Taped(Llama):
    """A model that records its passes on a tape."""

    tape = Tape()

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        with self.tape.recording():
            return super().forward(ids, positions, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.tape.recording():
            return super().logits(hidden)


def test_steps_that_are_enqueued_anew_are_other_programs(codec: str) -> None:
    """Each step has its input in new memory, and the host decides which pages are sealed. The program does not contain
    lengths or tokens."""
    worker = worker_in_16_bits(codec, PI)
    model = Taped(worker.model.spec, worker.model.weights, kernels=InvariantRows())
    runner = ModelRunner(model, worker.codec, PAGES, SLOTS)

    def tape(*held: int) -> Tape:
        model.tape = Tape()
        step(runner, spans_of(*held), [5 + rows for rows in held])
        return model.tape

    tape(1, 2)  # allocates the memory that all later steps share
    assert differences(tape(3, 40), tape(35, 4)) == {"places"}
    assert differences(tape(3, 40), tape(PI - 1, 4)) == {"acts"}


def test_recorded_steps_on_kernels_give_the_bytes_of_others(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences run as a batch of four. Two of them fill a page in turn, and one reads its sealed page."""
    few_sizes(monkeypatch, 4, 2)
    both = runners(codec, PI, 4)
    held, ids = [PI - 1, PI - 2, 3], [7, 8, 9]
    before = both.recorder.replays
    for _ in range(3):
        found, expected = (step(runner, spans_of(*held), ids) for runner in (both.recorded, both.eager))
        assert found == expected
        held, ids = [rows + 1 for rows in held], expected
    assert both.recorder.replays - before == 3 + 2, "steps, and two programs that seal"
    assert_same_pages(both)
    for slot in range(SLOTS):
        assert_same_rows(both, slot, [slice(None)])


def test_a_faulty_sequence_is_named_as_by_a_step_enqueued_anew() -> None:
    """After a fault the step is run again, layer by layer."""
    with standing():
        both = runners("fp16", SMALL, 4, layers=2)
    for runner in (both.recorded, both.eager):
        weights = runner.model.weights
        assert isinstance(weights.embed, Tensor)
        weights.embed[9] = torch.nan
        with pytest.raises(NonFiniteError, match="layer 0: K is nan at token 3, KV head 0") as error:
            step(runner, spans_of(5, 3, 6), [7, 9, 8])
        assert error.value.span == 1
        weights.embed[9] = 0
    found, expected = (step(runner, spans_of(5, 3, 6), [7, 9, 8]) for runner in (both.recorded, both.eager))
    assert found == expected, "the fault is gone with its token"


def test_what_cannot_be_recorded_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cannot be recorded with a codec that its definition serves, pages that change with every row, 32-bit
    weights, or more sequences than recorded."""
    worker = worker_in_16_bits("kvquant-2", 40)  # Triton has no kernels for pages of forty rows
    wide = Llama(worker.model.spec, worker.model.weights, kernels=InvariantRows())
    wide.dtype = torch.float32
    with standing():
        rows = worker_in_16_bits("fp16", SMALL)
    with on_tape() as recorder:
        for model, codec in ((worker.model, worker.codec), (wide, rows.codec)):
            runner = ModelRunner(model, codec, PAGES, SLOTS, recorded=2)
            runner.record()
            assert runner.memory.pools[0].num_pages == PAGES, "nothing is spare"
        assert not recorder.tapes
        few = ModelRunner(rows.model, rows.codec, PAGES, SLOTS, recorded=2)
        few.record()
        before = recorder.replays
        step(few, spans_of(1, 2, 3), [7, 8, 9])
        assert recorder.replays == before


def test_a_device_that_cannot_record_says_so_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing():
        worker = worker_in_16_bits("fp16", SMALL)

    class Refusing:
        queues = True

        def record(self, work: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with on_tape():
        runner = ModelRunner(worker.model, worker.codec, PAGES, SLOTS, recorded=2)
    runner._recorder = Refusing()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"graphs: cpu cannot record a decode step: operation not permitted"):
        runner.record()


@given(most=st.integers(1, 300), data=st.data())
def test_every_batch_has_a_recorded_size_that_is_not_much_larger(most: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, most))
    sizes, fills = step_sizes(most), fill_sizes(most)
    for each in (sizes, fills):
        assert each == sorted(set(each))
        assert each[0] == 1
        assert each[-1] == most
    assert min(size for size in sizes if size >= count) - count < graphs.STEP
    assert min(size for size in fills if size >= count) < 2 * count or count == 1
