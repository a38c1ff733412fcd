"""Steps that are recorded, and begun before the one before them is over, give what steps give that are enqueued anew.

A tape stands for CUDA graphs (`tests/tape.py`), and a stand-in for the kernel that reads FP16 rows
(`tests/standing.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from decode_node.engine import DecodeEngine, Sequence, StepPart
from hackkv.batch import Span
from hackkv.errors import NonFiniteError
from hackkv.kv_memory import HostKv
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState
from hackkv.types import Request, Token
from tests.lanes import Lagging, on_lanes
from tests.pair import DECODING, greedy, paired, prompt
from tests.standing import (
    PAGES,
    SLOTS,
    SMALL,
    assert_same_pages,
    assert_same_rows,
    runners,
    spans_of,
    standing,
    states,
    worker_in_16_bits,
)
from tests.tape import on_tape


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

    def __init__(self, runner: ModelRunner, seed: int, backward: float, page_tokens: int = SMALL) -> None:
        """`backward` is the share of sequences whose rules look at their tokens."""
        self._runner, self._chance, self._page_tokens = runner, Random(seed), page_tokens
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
        rows = self._chance.randrange(1, 3 * self._page_tokens)
        if rows // self._page_tokens > len(self._pages):
            return
        ids = prompt(number, rows)
        rules: dict[str, object] = {"temperature": self._chance.choice([0.0, 0.9]), "seed": number, "min_tokens": 3}
        if self._chance.random() < self._backward:
            rules |= {"presence_penalty": 0.5, "logprobs": 1}
        stops = frozenset(range(self._chance.randrange(SMALL), 600, 12))
        sampling = greedy("r", ids, self._chance.choice([5, 999]), ignore_eos=True, stop_token_ids=stops, **rules)
        sampler = SamplerState(sampling.sampling, ids, (), kernels=self._runner.model.kernels)
        one = Going(self._slots.pop(), self._take(rows // self._page_tokens), rows, Sequence([ids[0]], sampler, 0.0))
        self._runner.forward([Span(one.slot, 0, rows, one.pages)], ids)
        self.said.append(one.said)
        self.going.append(one)

    def _leave(self, one: Going) -> None:
        self.going.remove(one)
        self._slots.append(one.slot)
        self._pages += one.pages

    def _move(self, one: Going) -> None:
        kv: HostKv = self._runner.memory.copy_out(one.pages[: one.held // self._page_tokens], one.slot, one.held)
        self._slots.append(one.slot)
        self._pages += one.pages
        self._chance.shuffle(self._pages)
        one.slot, one.pages = self._slots.pop(0), self._take(one.held // self._page_tokens)
        self._runner.memory.copy_back(kv, one.pages, one.slot)

    def _take(self, count: int) -> tuple[int, ...]:
        taken, self._pages = self._pages[:count], self._pages[count:]
        return tuple(taken)

    def _step(self) -> None:
        for one in list(self.going):
            if (one.held + 1) // self._page_tokens > len(one.pages):
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


@pytest.mark.parametrize(
    ("seed", "backward"),
    [(1, 0.0), pytest.param(2, 0.0, marks=pytest.mark.slow), (3, 0.2), pytest.param(4, 1.0, marks=pytest.mark.slow)],
)
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


def test_copies_wait_for_a_step_that_was_begun_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into slots that may be others' when it is over; what is given to `Lanes` from then on comes behind."""
    with standing():
        runner = runners("fp16", SMALL, 4).recorded
    assert runner._graphs is not None
    done, run, written = list[str](), runner._graphs.run, runner.memory.lanes.written

    def noted_run(spans: list[Span], ids: list[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
        done.append("a step" if after is None else "ahead")
        return run(spans, ids, after)

    def noted_written() -> None:
        done.append("written")
        written()

    monkeypatch.setattr(runner._graphs, "run", noted_run)
    monkeypatch.setattr(runner.memory.lanes, "written", noted_written)
    engine = DecodeEngine(runner)
    going = [Sequence([7 + at], state, 0.0) for at, state in enumerate(states(2))]
    for rows in (3, 4):
        spans = spans_of(rows, rows)
        engine.step([StepPart(each, span, replay=False) for each, span in zip(going, spans, strict=True)])
    assert done == ["a step", "ahead", "written", "ahead", "written"]


def requests(*, backward: bool) -> list[Request]:
    """Requests of different lengths. Some are sampled, and with `backward` by rules that look at earlier tokens."""
    made = [greedy(f"r{i}", prompt(i, 1 + 7 * i), 30, ignore_eos=True) for i in range(6)]
    drawn: dict[str, object] = {"temperature": 0.8, "top_p": 0.9}
    if backward:
        drawn |= {"presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 2}
    return [replace(r, sampling=replace(r.sampling, seed=i, **drawn)) if i % 2 else r for i, r in enumerate(made)]  # type: ignore[arg-type]


@pytest.mark.parametrize("backward", [False, True])
async def test_a_node_that_runs_recorded_steps_says_what_one_process_says(backward: bool) -> None:
    """Through wire, joins, full pages and swaps, with copies that lag."""
    with standing():
        worker = worker_in_16_bits("fp16", SMALL)
    asked = requests(backward=backward)
    expected = [generate(worker, request) for request in asked]
    with on_tape() as recorder, on_lanes(Lagging(7, computes=False).lanes):
        async with paired(worker, num_pages=26, decoding=DECODING) as nodes:
            before = recorder.replays
            served = await asyncio.gather(*map(nodes.serve, asked))
            await nodes.assert_idle()
            foreseen = nodes.decode._steps._engine.foreseen
    assert backward or foreseen > 50
    assert [result.tokens for result in served] == expected
    assert recorder.replays > before
    assert sum(result.swaps for result in served) > 0


async def test_a_node_that_is_told_not_to_records_nothing() -> None:
    with standing():
        worker = worker_in_16_bits("fp16", SMALL)
    with on_tape() as recorder:
        async with paired(worker, decoding=DECODING.model_copy(update={"graphs": False})) as nodes:
            await nodes.serve(requests(backward=False)[0])
    assert not recorder.tapes


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
