"""Recorded decode steps: one program whatever the batch holds. Run again, it gives the bytes and tokens of a step that
is enqueued anew.

No GPU is needed: a tape (`tests/tape.py`) stands for a CUDA graph. It records steps on the Triton backend, interpreted,
from the tokens' ids to the hidden states. The choice after them is not part of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decode_node.engine import DecodeEngine, Sequence, StepPart
from hackkv.batch import Span
from hackkv.errors import ConfigError, NonFiniteError
from hackkv.kv_memory import HostKv
from hackkv.model import graphs
from hackkv.model.generate import generate
from hackkv.model.graphs import fill_sizes, step_sizes
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.types import Request, Token
from tests.pair import DECODING, PI, greedy, paired, prompt
from tests.standing import InvariantRows, standing, worker_in_16_bits
from tests.tape import Tape, TapeRecorder, differences, on_tape

SLOTS = 5
PAGES = 24
SMALL = 8
"""Rows of a page where no kernel of Triton has to know it."""


@pytest.fixture(params=["rot-k3v2", "fp16"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Runners:
    """One that runs recorded steps again, and one that enqueues each."""

    recorded: ModelRunner
    eager: ModelRunner
    recorder: TapeRecorder


def runners(codec: str, page_tokens: int, most: int, layers: int = 1) -> Runners:
    worker = worker_in_16_bits(codec, page_tokens, layers)
    with on_tape() as recorder:
        recorded = ModelRunner(worker.model, worker.codec, PAGES, SLOTS, recorded=most)
        recorded.record()
    return Runners(recorded, ModelRunner(worker.model, worker.codec, PAGES, SLOTS), recorder)


def few_sizes(monkeypatch: pytest.MonkeyPatch, steps: int, fills: int) -> None:
    """Interpreted, each size takes a while."""
    monkeypatch.setattr(graphs, "step_sizes", lambda most: [steps])
    monkeypatch.setattr(graphs, "fill_sizes", lambda most: [fills])


def spans_of(*held: int, pages: int = 2) -> list[Span]:
    return [Span(slot, rows, 1, tuple(range(slot * pages, (slot + 1) * pages))) for slot, rows in enumerate(held)]


def states(count: int) -> list[SamplerState]:
    return [SamplerState(greedy("r", (5,), 99, ignore_eos=True).sampling, (5,), ()) for _ in range(count)]


def step(runner: ModelRunner, spans: list[Span], ids: list[int]) -> list[int]:
    with torch.inference_mode():
        return [token.token_id for token in runner.choose(spans, ids, states(len(spans)))]


def test_a_step_is_one_program_whatever_it_holds(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither lengths, tokens, pages, who fills one nor how many rows belong to nobody are numbers of the program."""
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


def test_recorded_steps_on_kernels_give_the_bytes_of_others(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences run as four; one fills a page, then another does, then one reads what it sealed."""
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


def assert_same_pages(both: Runners) -> None:
    """All that sequences can have."""
    for found, expected in zip(both.recorded.memory.pools, both.eager.memory.pools, strict=True):
        for name, plane in expected.planes.items():
            assert torch.equal(_bits(found.planes[name][:PAGES]), _bits(plane)), name


def assert_same_rows(both: Runners, slot: int, runs: Iterable[slice]) -> None:
    """In these places of a slot."""
    for found, expected in zip(both.recorded.memory.pools, both.eager.memory.pools, strict=True):
        for run in runs:
            assert torch.equal(_bits(found.open_k[slot, :, run]), _bits(expected.open_k[slot, :, run]))
            assert torch.equal(_bits(found.open_v[slot, :, run]), _bits(expected.open_v[slot, :, run]))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@dataclass
class Going:
    """A sequence of a random schedule."""

    slot: int
    pages: tuple[int, ...]
    held: int
    sequence: Sequence
    said: list[int] = field(default_factory=list)

    @property
    def span(self) -> Span:
        return Span(self.slot, self.held, 1, self.pages)


class Schedule:
    """Sequences that join, grow, stop, leave, and move to host memory and to other pages and slots, as a seed draws."""

    def __init__(self, runner: ModelRunner, seed: int, backward: float) -> None:
        """`backward` is the share of sequences whose rules look at their tokens."""
        self._runner, self._chance = runner, Random(seed)
        self.engine = DecodeEngine(runner)
        self._slots, self._pages = list(range(SLOTS)), list(range(PAGES))
        self._backward = backward
        self.going = list[Going]()
        self.said = list[list[int]]()
        """Tokens of each sequence."""

    def run(self, steps: int) -> list[list[int]]:
        for number in range(steps):
            self._join(number)
            if self.going and self._chance.random() < 0.1:
                self._leave(self._chance.choice(self.going))
            if self.going and self._chance.random() < 0.15:
                self._move(self._chance.choice(self.going))
            self._step()
        return self.said

    def _join(self, number: int) -> None:
        if len(self.going) == SLOTS or (self.going and self._chance.random() < 0.6):
            return
        rows = self._chance.randrange(1, 3 * SMALL)
        if rows // SMALL > len(self._pages):
            return
        ids = prompt(number, rows)
        rules: dict[str, object] = {"temperature": self._chance.choice([0.0, 0.9]), "seed": number, "min_tokens": 3}
        if self._chance.random() < self._backward:
            rules |= {"presence_penalty": 0.5, "logprobs": 1}
        stops = frozenset(range(self._chance.randrange(SMALL), 600, 12))
        sampling = greedy("r", ids, self._chance.choice([5, 999]), ignore_eos=True, stop_token_ids=stops, **rules)
        sampler = SamplerState(sampling.sampling, ids, (), kernels=self._runner.model.kernels)
        one = Going(self._slots.pop(), self._take(rows // SMALL), rows, Sequence([ids[0]], sampler, 0.0))
        self._runner.forward([Span(one.slot, 0, rows, one.pages)], ids)
        self.said.append(one.said)
        self.going.append(one)

    def _leave(self, one: Going) -> None:
        self.going.remove(one)
        self._slots.append(one.slot)
        self._pages += one.pages

    def _move(self, one: Going) -> None:
        kv: HostKv = self._runner.memory.copy_out(one.pages[: one.held // SMALL], one.slot, one.held)
        self._slots.append(one.slot)
        self._pages += one.pages
        self._chance.shuffle(self._pages)
        one.slot, one.pages = self._slots.pop(0), self._take(one.held // SMALL)
        self._runner.memory.copy_back(kv, one.pages, one.slot)

    def _take(self, count: int) -> tuple[int, ...]:
        taken, self._pages = self._pages[:count], self._pages[count:]
        return tuple(taken)

    def _step(self) -> None:
        for one in list(self.going):
            if (one.held + 1) // SMALL > len(one.pages):
                if not self._pages:
                    self._leave(one)
                    continue
                one.pages += self._take(1)
        if not self.going:
            return
        tokens = self.engine.step([StepPart(one.sequence, one.span, replay=False) for one in self.going])
        for one, token in zip(list(self.going), tokens, strict=True):
            assert isinstance(token, Token)
            one.held += 1
            one.said.append(token.token_id)
            if token.finish is not None:
                self._leave(one)


@pytest.mark.parametrize(("seed", "backward"), [(1, 0.0), (2, 0.0), (3, 0.2), (4, 1.0)])
@torch.inference_mode()
def test_random_schedules_give_the_bytes_and_tokens_of_steps_enqueued_anew(seed: int, backward: float) -> None:
    """Across joins, leaves, full pages and swaps; what is nobody's is rubbish before each step. Steps are begun ahead
    where no rule looks back."""
    with standing():
        both = runners("fp16", SMALL, SLOTS, layers=2)
    assert both.recorded._graphs is not None
    run = both.recorded._graphs.run

    def poisoned(spans: list[Span], ids: list[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for pool in both.recorded.memory.pools:
            for plane in (pool.open_k, pool.open_v, *pool.planes.values()):
                plane[-1:].fill_(torch.nan)
        return run(spans, ids, after)

    before = both.recorder.replays
    both.recorded._graphs.run = poisoned  # type: ignore[method-assign, assignment]
    mine, its = (Schedule(runner, seed, backward) for runner in (both.recorded, both.eager))
    assert mine.run(70) == its.run(70)
    said = sum(map(len, its.said))
    assert said > 100
    assert both.recorder.replays - before > 80, "steps, and programs that seal"
    assert its.engine.foreseen == 0
    assert (mine.engine.foreseen > said / 2) == (backward == 0.0), (mine.engine.foreseen, said)
    assert (mine.engine.foreseen == 0) == (backward == 1.0)
    for one in mine.going:
        runs = both.eager.memory.footprint.runs(one.held)
        assert_same_rows(both, one.slot, runs)
    assert_same_pages(both)


def requests() -> list[Request]:
    """Of random lengths; some draw, and some ask for what looks at earlier tokens."""
    made = [greedy(f"r{i}", prompt(i, 1 + 7 * i), 30, ignore_eos=True) for i in range(6)]
    drawn = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 2}
    return [replace(r, sampling=replace(r.sampling, seed=i, **drawn)) if i % 2 else r for i, r in enumerate(made)]  # type: ignore[arg-type]


async def test_a_node_that_runs_recorded_steps_says_what_one_process_says() -> None:
    """Through wire, joins, full pages and swaps."""
    with standing():
        worker = worker_in_16_bits("fp16", SMALL)
    expected = [generate(worker, request) for request in requests()]
    with on_tape() as recorder:
        async with paired(worker, num_pages=26, decoding=DECODING) as nodes:
            before = recorder.replays
            served = await asyncio.gather(*map(nodes.serve, requests()))
            await nodes.assert_idle()
    assert [result.tokens for result in served] == expected
    assert recorder.replays > before
    assert sum(result.swaps for result in served) > 0


async def test_a_node_that_is_told_not_to_records_nothing() -> None:
    with standing():
        worker = worker_in_16_bits("fp16", SMALL)
    with on_tape() as recorder:
        async with paired(worker, decoding=DECODING.model_copy(update={"graphs": False})) as nodes:
            await nodes.serve(requests()[0])
    assert not recorder.tapes


def test_a_faulty_sequence_is_named_as_by_a_step_enqueued_anew() -> None:
    """The step is run again then, layer by layer."""
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


@torch.inference_mode()
def test_a_fault_in_a_step_that_was_begun_ahead_ends_its_sequence_alone() -> None:
    """A token that a sequence comes to has no finite embedding. Others go on."""
    with standing():
        both, sound = (runners("fp16", SMALL, 4, layers=2) for _ in range(2))
    weights = both.eager.model.weights
    assert isinstance(weights.embed, Tensor)

    def run(runner: ModelRunner) -> tuple[list[list[int]], list[str], int]:
        engine, said, errors = DecodeEngine(runner), [list[int]() for _ in range(3)], list[str]()
        going = [Sequence([7 + at], state, 0.0) for at, state in enumerate(states(3))]
        spans, alive = spans_of(3, 5, 0, pages=3), [0, 1, 2]
        for _ in range(12):
            batch = [
                StepPart(going[at], replace(spans[at], held=spans[at].held + len(said[at])), False) for at in alive
            ]
            for at, token in zip(list(alive), engine.step(batch), strict=True):
                if isinstance(token, NonFiniteError):
                    errors.append(str(token))
                    alive.remove(at)
                else:
                    assert token is not None
                    said[at].append(token.token_id)
        return said, errors, engine.foreseen

    said, errors, _ = run(sound.eager)
    assert not errors
    others = {*said[0], *said[2], *said[1][:3], 7, 8, 9}
    at, faulty = next((at, token) for at, token in enumerate(said[1]) if at >= 3 and token not in others)
    weights.embed[faulty] = torch.nan
    found, expected = run(both.recorded), run(both.eager)
    assert found[:2] == expected[:2]
    assert len(found[1]) == 1
    assert f"at token {5 + at + 1}, " in found[1][0]
    assert found[2] > 20
    assert expected[2] == 0


def test_what_cannot_be_recorded_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs that definitions serve, pages that change with every row, weights of 32 bits; and steps of more
    sequences than were recorded."""
    worker = worker_in_16_bits("fp8", PI)
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
