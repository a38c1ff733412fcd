"""Pages that rest as FP16 rows of decoded codes: coding them again loses nothing more."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import load
from hack_kernels.decoded import DecodedFormat, DecodedKernels
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.pools import new_pool
from hack_kernels.reference.groups import GroupReference
from hack_kernels.reference.rows import RowReference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

PI, D = 32, 32
CPU = torch.device("cpu")
CENTRES = (15, 7, 5, 3)
"""Centres of 32, 16, 12 and 8 bins."""


def coded_format(centre: int) -> GroupFormat:
    side = Grouping(4 if 2 * centre < 16 else 5, D, centre=centre)
    return GroupFormat(D, side, side, PI)


def stood_for(coder: GroupReference, rows: Tensor) -> Tensor:
    """Rows -> codes -> rows."""
    return coder.dequantize("k", coder.quantize("k", rows)).half()


@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-24, 15),
    centre=st.sampled_from(CENTRES),
    zeros=st.booleans(),
)
def test_rows_of_codes_are_coded_as_codes_of_the_same_rows(seed: int, exponent: int, centre: int, zeros: bool) -> None:
    """Values range from FP16's smallest, where rounding moves a value by as much as a code, to its largest."""
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(1, PI, D, generator=generator) * 2 - 1) * 2.0 ** torch.arange(exponent, exponent + 1)
    if zeros:
        rows[:, ::3] = 0
    coder = GroupReference(coded_format(centre), CPU)
    once = stood_for(coder, rows.half())
    assert torch.equal(stood_for(coder, once).view(torch.int16), once.view(torch.int16))


@pytest.mark.parametrize("centre", CENTRES)
def test_a_page_rests_the_same_where_it_was_made_and_where_it_came_to(centre: int) -> None:
    coded = coded_format(centre)
    fmt = DecodedFormat.of(coded)
    kernels = DecodedKernels(fmt, GroupReference(coded, CPU), load("auto").kernels_for(fmt.rows, RowReference))
    here, there = (new_pool(fmt, kernels, CPU, 3, 1, range(2)) for _ in range(2))
    k, v = torch.randn(2, 2, 2, PI, D).half()
    ids = torch.tensor([2, 0])
    kernels.seal(0, here, ids, ids * PI, k, v)
    sent = kernels.export(here, ids)
    assert {name: plane.shape[2:] for name, plane in sent.items()} == {p.name: p.shape for p in coded.planes}
    kernels.install(there, ids, sent)
    for name, rows in (("k", k), ("v", v)):
        assert torch.equal(here.planes[name], there.planes[name])
        assert torch.equal(here.planes[name][ids], stood_for(GroupReference(coded, CPU), rows))


def test_other_planes_are_refused_and_no_code_becomes_infinite() -> None:
    coded = coded_format(7)
    fmt = DecodedFormat.of(coded)
    kernels = DecodedKernels(fmt, GroupReference(coded, CPU), RowReference(fmt.rows, CPU))
    pool, ids = new_pool(fmt, kernels, CPU, 1, 1, range(1)), torch.tensor([0])
    with pytest.raises(ValueError, match="planes \\['k', 'v'\\] are not part of the format"):
        kernels.install(pool, ids, {name: plane.transpose(0, 1) for name, plane in pool.planes.items()})
    planes = {
        p.name: torch.full((1, 1, *p.shape), 255 if p.dtype == torch.uint8 else 6e4).to(p.dtype) for p in coded.planes
    }
    kernels.install(pool, ids, planes)
    assert all(bool(plane.isfinite().all()) for plane in pool.planes.values())
