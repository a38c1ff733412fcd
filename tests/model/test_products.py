"""The number of rows from which on the library multiplies follows from times, which are measured once per CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hack_kernels.block_weight import WIDTHS, BlockWeight, Weight
from hack_kernels.rowwise import Rowwise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hackkv import store
from hackkv.model import products
from hackkv.model.products import GAIN, NEVER, ROUNDS, ROWS, library_rows, measure, takeover, unpack_rows

TIMES = st.tuples(*(st.floats(1e-6, 1.0) for _ in range(2)))


@given(st.lists(TIMES, min_size=len(ROWS), max_size=len(ROWS)))
def test_the_library_takes_over_where_it_stays_faster(times: list[tuple[float, float]]) -> None:
    seconds = dict(zip(ROWS, times, strict=True))
    taken = takeover(seconds)
    wins = {rows: ours >= GAIN * library for rows, (ours, library) in seconds.items()}
    assert all(won for rows, won in wins.items() if rows >= taken)
    below = [rows for rows in ROWS if rows < taken]
    assert not below or not wins[below[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_is_asked_once(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = list[int]()

    def own(x: Tensor, weight: Tensor) -> Tensor:
        asked.append(len(x))
        return F.linear(x, weight)

    found = library_rows(own, dtype, "here")
    assert found in (*ROWS, NEVER)
    assert set(asked) == set(ROWS)
    asked.clear()
    assert library_rows(own, dtype, "here") == found
    assert not asked
    library_rows(own, dtype, "elsewhere")
    assert asked


class Counted(Rowwise):
    """Row kernels that record the bits of weights that they multiply."""

    def __init__(self) -> None:
        self.asked = set[int]()

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, BlockWeight):
            self.asked.add(weight.bits)
        return super().product(x, weight, bias)


def test_each_form_is_a_question_of_its_own_and_a_new_version_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "SIDE", 64)
    kernels = Counted()
    for version in ("1", "2"):
        monkeypatch.setattr(products, "VERSION", version)
        for bits in WIDTHS:
            for asked in (set[int]({bits}), set[int]()):
                kernels.asked.clear()
                assert unpack_rows(kernels, bits, torch.float32, "here") in (*ROWS, NEVER)
                assert kernels.asked == asked


def test_both_are_timed() -> None:
    assert all(min(times) > 0 for times in measure(F.linear, torch.float32).seconds.values())


class Machine:
    """A clock on which own products take one second and the library's half a second. Calls of the library that are
    `interrupted` take 20 seconds, most of them waiting. All calls wait a little, as a thread that wakes up does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[[int], bool]) -> None:
        self.now, self.calls, self.waited, self._interrupted = 0.0, 0, 0.0, interrupted
        monkeypatch.setattr(products, "perf_counter", lambda: self.now)
        monkeypatch.setattr(products, "waited_s", lambda: self.waited)
        monkeypatch.setattr(products, "SIDE", 4)
        for name in ("SECONDS", "PATIENCE_S"):
            monkeypatch.setattr(products, name, getattr(products, name) * 1e4)

    def own(self, x: Tensor, weight: Tensor) -> Tensor:
        self.now += 1
        return x

    def library(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        if self._interrupted(self.calls):
            self.now, self.waited = self.now + 20, self.waited + 19
        else:
            self.now, self.waited = self.now + 0.5, self.waited + 1e-5
        return x


def test_calls_that_other_work_interrupts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds at the first number of rows are interrupted, and nine of ten of the others."""
    machine = Machine(monkeypatch, lambda call: call <= ROUNDS or call % 10 != 0)
    measured = measure(machine.own, torch.float32, machine.library)
    assert set(measured.seconds.values()) == {(1.0, 0.5)}
    assert not measured.disturbed


def test_what_a_busy_machine_says_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    busy = [True]
    machine = Machine(monkeypatch, lambda call: busy[0])
    monkeypatch.setattr(products, "measure", partial(measure, library=machine.library))
    now = [1000.0]
    monkeypatch.setattr(store, "time", lambda: now[0])
    assert library_rows(machine.own, torch.float32, "here") == NEVER
    busy[0] = False
    assert library_rows(machine.own, torch.float32, "here") == NEVER
    now[0] += store.PASSING_S
    for _ in range(2):
        assert library_rows(machine.own, torch.float32, "here") == ROWS[0]
        now[0] += 2 * store.PASSING_S
        busy[0] = True
