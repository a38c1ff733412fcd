"""Pages that are selected in C++, on every instruction set, against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable
from hack_kernels.cpu.extension import compiled, supported_isas
from hack_kernels.page_selection import BoundedPages, PageSelecting, PageSelectKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

ALPHA = 0.75
"""With whole numbers every score is exact in FP32, so that choices are the same, those between equal scores too."""
HEADS, GROUP = 2, 3
every_isa = pytest.mark.parametrize("isa", ISAS)


def kernels(isa: str, threads: int = 2) -> PageSelectKernels:
    return cpu.CpuBackend(isa, threads=threads).rows


def example(seed: int, sealed: list[int], dim: int = 64) -> tuple[Tensor, BoundedPages]:
    """Queries [B, Hq, D] bfloat16 and pages in random places of a pool, a few of which have equal bounds. All are whole
    numbers."""
    draw = torch.Generator().manual_seed(seed)
    width = max(sealed) + seed % 3
    total = len(sealed) * width + 1
    bounds = torch.randint(-8, 9, (2, total, HEADS, dim), generator=draw).half()
    bounds[:, 1::5] = bounds[:, :1]
    table = torch.randperm(total, generator=draw)[: len(sealed) * width].view(len(sealed), width)
    q = torch.randint(-8, 9, (len(sealed), HEADS * GROUP, dim), generator=draw).bfloat16()
    return q, BoundedPages(bounds.amin(0), bounds.amax(0), table, torch.tensor(sealed))


@every_isa
@settings(max_examples=60, deadline=None)
@given(
    sealed=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    wanted=st.integers(2, 20),
    halve=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_definitions_pages_are_selected(
    isa: str, sealed: list[int], wanted: int, halve: bool, threads: int, seed: int
) -> None:
    q, pages = example(seed, sealed)
    counts = pages.sealed.clamp(max=wanted)
    found = kernels(isa, threads).select_pages(q, pages, counts, ALPHA, halve=halve)
    assert torch.equal(found, PageSelecting().select_pages(q, pages, counts, ALPHA, halve=halve))
    for index, held in enumerate(sealed):
        if held:
            first, last = pages.table[index, [0, held - 1]].tolist()
            assert set(found[index, :, 0].tolist()) == {first}
            assert set(found[index, :, counts[index] - 1].tolist()) == {last}


@every_isa
def test_the_best_of_the_better_pairs_are_read(isa: str) -> None:
    """Pages whose keys are equal numbers, and a query of ones: a score is the number times the channels."""
    numbers = [0, 9, 1, 8, 7, 7, 0, 0, 6, 6, 2, 0]
    keys = torch.tensor(numbers).half()[:, None, None].expand(-1, 1, 64).contiguous()
    pages = BoundedPages(keys, keys, torch.arange(12)[None], torch.tensor([12]))
    q = torch.ones(1, 1, 64)

    def read(count: int, halve: bool) -> list[int]:
        found: list[int] = kernels(isa).select_pages(q, pages, torch.tensor([count]), 0.6, halve=halve)[0, 0].tolist()
        return found[:count]

    assert read(5, halve=False) == [0, 1, 3, 4, 11]
    # A pair has 0.6 of its larger number and 0.4 of its smaller one, so 7 and 7 beat 1 and 8. Both end pairs stay.
    assert read(6, halve=True) == [0, 1, 4, 5, 10, 11]


def test_every_instruction_set_and_number_of_threads_selects_the_same() -> None:
    """Pages hold the same numbers in other channels, so that scores differ by the rounding of sums alone."""
    draw = torch.Generator().manual_seed(7)
    numbers = torch.randn(64, generator=draw)
    shuffled = [numbers[torch.randperm(64, generator=draw)] for _ in range(60 * HEADS)]
    keys = torch.stack(shuffled).half().view(60, HEADS, 64)
    pages = BoundedPages(keys, keys, torch.arange(60)[None], torch.tensor([60]))
    q, counts = torch.full((1, HEADS * GROUP, 64), 0.3), torch.tensor([20])
    for halve in (False, True):
        each = [
            kernels(isa, threads).select_pages(q, pages, counts, 0.6, halve=halve) for isa in ISAS for threads in (1, 2)
        ]
        assert all(torch.equal(one, each[0]) for one in each)


@every_isa
def test_parts_of_a_pool_and_odd_widths_are_read_too(isa: str) -> None:
    q, pages = example(3, [20, 9])
    one = replace(pages, least=pages.least[:, 1:], most=pages.most[:, 1:])
    counts = torch.tensor([6, 6])
    both = kernels(isa).select_pages(q, pages, counts, ALPHA, halve=True)
    assert torch.equal(kernels(isa).select_pages(q[:, GROUP:], one, counts, ALPHA, halve=True)[:, 0], both[:, 1])
    q, pages = example(4, [20, 9], dim=72)  # C++ takes no such rows
    found = kernels(isa).select_pages(q, pages, counts, ALPHA, halve=False)
    assert torch.equal(found, PageSelecting().select_pages(q, pages, counts, ALPHA, halve=False))


@every_isa
def test_bad_arguments_are_refused_by_name(isa: str) -> None:
    native = compiled().kernels(isa, 1)
    q, pages = example(5, [8])
    q, two, out = q.float(), torch.tensor([2]), torch.zeros(1, HEADS, pages.table.shape[1], dtype=torch.int64)
    good = (q, pages.least, pages.most, pages.table, pages.sealed, two, ALPHA, False, out)
    native.select_pages(*good)
    for place, bad, reason in (
        (0, q[:, :5].contiguous(), "multiple of Hkv heads"),
        (0, q[..., :24].contiguous(), "float16"),
        (1, pages.least.float(), "least"),
        (2, pages.most[1:], "most"),
        (3, pages.table + 9, "outside the pool"),
        (3, pages.table - 9, "outside the pool"),
        (4, torch.tensor([99]), "sealed"),
        (4, torch.tensor([-1]), "sealed"),
        (5, torch.tensor([1]), "counts"),
        (5, torch.tensor([9]), "counts"),
        (8, out[:, :, :1].contiguous(), "out"),
    ):
        with pytest.raises(ValueError, match=reason):
            native.select_pages(*good[:place], bad, *good[place + 1 :])
