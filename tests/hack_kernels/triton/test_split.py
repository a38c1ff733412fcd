"""The division of a batch's pages among programs."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from hack_kernels.triton.split import Workspace, opening_of, part_of
from hypothesis import given, settings
from hypothesis import strategies as st


@triton.jit  # type: ignore[untyped-decorator]
def _divide(openings, owners, parts, total, PARTS: tl.constexpr, TOTAL: tl.constexpr):  # type: ignore[no-untyped-def]
    part, unit = tl.arange(0, PARTS), tl.arange(0, TOTAL)
    tl.store(openings + part, opening_of(part, parts, total), mask=part <= parts)
    tl.store(owners + unit, part_of(unit, parts, total), mask=unit < total)


@settings(max_examples=40)
@given(total=st.integers(1, 300), programs=st.integers(1, 40))
def test_every_unit_has_one_program_and_stretches_are_equal_but_for_one_unit(total: int, programs: int) -> None:
    parts = min(programs, total)
    openings = torch.full((parts + 1,), -1, dtype=torch.int32)
    owners = torch.full((total,), -1, dtype=torch.int32)
    _divide[(1,)](openings, owners, parts, total, PARTS=64, TOTAL=512)
    lengths = openings.diff()
    assert openings[0] == 0
    assert openings[-1] == total
    assert lengths.max() - lengths.min() <= 1
    assert torch.equal(owners, torch.arange(parts, dtype=torch.int32).repeat_interleave(lengths))


def test_a_workspace_does_not_grow_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeroing of new tickets would be recorded but not done, and an eager launch would read garbage."""
    workspace = Workspace(torch.device("cpu"), 3)
    tickets = workspace.tickets(2, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert workspace.tickets(1, 8) is tickets
    with pytest.raises(RuntimeError, match="inside the capture of a CUDA graph"):
        workspace.tickets(3, 4)
    with pytest.raises(RuntimeError, match="inside the capture of a CUDA graph"):
        workspace.partials(4, 1, 64, 8)


def test_what_a_workspace_has_outgrown_stays_allocated() -> None:
    """A graph goes on using the memory that it was captured with."""
    workspace = Workspace(torch.device("cpu"), 3)
    captured = [weakref.ref(workspace.tickets(1, 4)), weakref.ref(workspace.partials(4, 1, 64, 8))]
    assert workspace.tickets(2, 4).numel() == 8
    assert workspace.partials(8, 1, 64, 8).numel() == 8 * 2 * 96 * 8
    assert all(memory() is not None for memory in captured)
