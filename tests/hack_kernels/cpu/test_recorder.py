"""Calls of kernels that are recorded and replayed."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from hack_kernels.base import RowKernels
from hack_kernels.cpu import CpuBackend
from hack_kernels.cpu.extension import compiled
from hack_kernels.cpu.recorder import CpuRecorder
from torch import Tensor


@pytest.fixture
def rows() -> RowKernels:
    return CpuBackend().rows


def length(program: Any) -> int:
    """The number of calls in a program."""
    assert isinstance(program, compiled().Program)
    return len(program)


def test_calls_are_made_again_on_the_same_memory(rows: RowKernels) -> None:
    """Views and empty tensors are no calls. Results between two calls are in memory of the program."""
    x, weight, found = torch.rand(2, 8), torch.rand(4, 8), list[Tensor]()

    def work() -> None:
        found.append(rows.gate(rows.product(x[:1], weight)))

    again = CpuRecorder().record(work)
    assert length(again) == 2
    for _ in range(3):
        x.copy_(torch.rand(2, 8))
        again()
        (out,) = found
        assert torch.equal(out, rows.gate(rows.product(x[:1], weight)))


def test_programs_of_one_recorder_share_their_memory(rows: RowKernels) -> None:
    """Memory that a program no longer needs is used by its next call, and by the next program."""
    x, weight, places = torch.rand(1, 64), torch.rand(64, 64), list[int]()

    def work() -> None:
        row = x
        for _ in range(6):
            row = rows.product(row, weight)
            places.append(row.data_ptr())

    recorder = CpuRecorder()
    first, second = recorder.record(work), recorder.record(work)
    gc.collect()
    assert len(set(places)) == 2, "a product reads one row and writes another"
    assert first is not second


def test_work_of_torch_is_done_anew(rows: RowKernels) -> None:
    x, found = torch.rand(1, 8), list[Tensor]()

    def work() -> None:
        found.append(rows.gate(x * 2))

    again = CpuRecorder().record(work)
    assert again is work
    again()
    assert torch.equal(found[-1], rows.gate(x * 2))


def test_an_error_ends_the_recording(rows: RowKernels) -> None:
    def work() -> None:
        raise KeyError("of the work")

    recorder = CpuRecorder()
    with pytest.raises(KeyError, match="of the work"):
        recorder.record(work)
    x = torch.rand(1, 8)

    def sound() -> None:
        rows.gate(x)

    assert length(recorder.record(sound)) == 1, "nothing of what failed"


def test_a_recording_within_a_recording_is_refused(rows: RowKernels) -> None:
    recorder = CpuRecorder()

    def work() -> None:
        recorder.record(lambda: None)

    with pytest.raises(ValueError, match="records already"):
        recorder.record(work)


def test_ids_are_looked_at_when_a_program_runs(rows: RowKernels) -> None:
    table, ids, found = torch.rand(3, 16), torch.tensor([0, 2]), list[Tensor]()
    again = CpuRecorder().record(lambda: found.append(rows.take(table, ids)))
    ids[1] = 1
    again()
    assert torch.equal(found[0], table[:2])
    for bad in (3, -1):
        ids[1] = bad
        with pytest.raises(ValueError, match="ids lie outside the rows"):
            again()


def test_recording_does_not_import_torchs_compiler() -> None:
    """Otherwise the first request would wait two seconds for the import."""
    done = """
import sys, torch
from hack_kernels.cpu import CpuBackend
rows, x = CpuBackend().rows, torch.rand(1, 64)
again = rows.recorder().record(lambda: (rows.gate(x), torch.empty_like(x), x.new_empty(3), torch.empty(2)))
assert again.__class__.__name__ == "Program", again
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", done], capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip() == "[]"
