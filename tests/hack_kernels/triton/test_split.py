"""How the pages of a batch are divided among programs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from hack_kernels.triton.split import opening_of, part_of
from hypothesis import given, settings
from hypothesis import strategies as st


@triton.jit  # type: ignore[untyped-decorator]
def _divide(openings, owners, parts, total, PARTS: tl.constexpr, TOTAL: tl.constexpr):  # type: ignore[no-untyped-def]
    part, unit = tl.arange(0, PARTS), tl.arange(0, TOTAL)
    tl.store(openings + part, opening_of(part, parts, total), mask=part <= parts)
    tl.store(owners + unit, part_of(unit, parts, total), mask=unit < total)


@settings(deadline=None, max_examples=40)
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
