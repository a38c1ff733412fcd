"""Ablation HACK/RQE in C++: growing pages equal the reference bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import Planes, Spans
from hack_kernels.hack_format import HackFormat, HackKernels, OpenPage, Rounding
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hack_kernels.cpu.cases import FORMATS, ISAS, LAYER
from tests.hack_kernels.pools import empty_pool, hack_kernels, random_rows, reference


def requantized(
    kernels: HackKernels, fmt: HackFormat, batches: list[list[int]], scale: float = 1.0
) -> Iterator[Planes]:
    """The planes in wire order after each batch; batch i appends batches[i][b] rows to sequence b.

    The pool contains other pages before.
    """
    width = -(-sum(max(batch) for batch in batches) // fmt.page_tokens)
    sequences, heads = len(batches[0]), 2
    ids = torch.arange(sequences * width)
    pool = empty_pool(kernels, fmt, ids.numel(), heads)
    stale = random_rows(1, ids.numel(), heads, fmt.page_tokens, fmt.head_dim).half()
    kernels.seal(LAYER, pool, ids, ids * fmt.page_tokens, stale, stale)
    starts = torch.zeros(sequences, dtype=torch.int64)
    for nth, batch in enumerate(batches):
        taking = torch.tensor(batch).nonzero()[:, 0]
        counts = torch.tensor(batch)[taking]
        offsets = counts.cumsum(0) - counts
        spans = Spans(starts[taking], counts, offsets, ids.view(sequences, width).flip(1)[taking], taking)
        k, v = (scale * random_rows(seed + 2 * nth, sum(batch), heads, fmt.head_dim) for seed in (2, 3))
        kernels.requantize(LAYER, pool, spans, *(x.clamp(-65504, 65504).half() for x in (k, v)))
        starts[taking] += counts
        yield kernels.export(pool, ids)


def assert_requantized_alike(
    backend: cpu.CpuBackend, fmt: HackFormat, batches: list[list[int]], scale: float = 1.0
) -> None:
    both = (requantized(k, fmt, batches, scale) for k in (hack_kernels(backend, fmt), reference(fmt)))
    for ours, theirs in zip(*both, strict=True):
        for name, plane in theirs.items():
            assert torch.equal(ours[name].view(torch.uint8), plane.view(torch.uint8)), name


@pytest.mark.grid
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_requantized_bytes_equal_the_reference(backend: cpu.CpuBackend, fmt: HackFormat) -> None:
    """A page grows by one row, by several and to its end, and the next one begins."""
    assert_requantized_alike(backend, fmt, [[fmt.page_tokens - 7], [1], [1], [9], [fmt.page_tokens]])


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-14, 300.0, 40000.0])
def test_requantized_bytes_equal_the_reference_at_extreme_scales(backend: cpu.CpuBackend, scale: float) -> None:
    """At the largest scales s·code + m exceeds the range of FP16."""
    fmt = HackFormat(64, 32, 4, 2, rounding=Rounding.STOCHASTIC)
    assert_requantized_alike(backend, fmt, [[20], [1], [1], [1]], scale)


@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data())
@settings(max_examples=15)
def test_any_batch_is_requantized_as_by_the_reference(isa: str, data: st.DataObject) -> None:
    """A batch has sequences that take no rows, some rows, or many pages at once."""
    backend = cpu.CpuBackend(isa, threads=data.draw(st.sampled_from([1, 3])))
    fmt = data.draw(st.sampled_from(FORMATS))
    rows = st.integers(0, 3) | st.integers(0, 2 * fmt.page_tokens)
    sequences = data.draw(st.integers(1, 3))
    batch = st.lists(rows, min_size=sequences, max_size=sequences).filter(any)
    assert_requantized_alike(backend, fmt, data.draw(st.lists(batch, min_size=1, max_size=4)))


def test_bad_spans_and_rows_of_a_requantization_are_named(backend: cpu.CpuBackend) -> None:
    fmt = HackFormat(64, 32, open_page=OpenPage.REQUANTIZE)
    kernels = hack_kernels(backend, fmt)
    pool, row = empty_pool(kernels, fmt, 3, 1), torch.zeros(1, 1, 64, dtype=torch.float16)
    one, table = torch.tensor([1]), torch.tensor([[0, 2]])
    for start, count, offset, ids in ((-1, 1, 0, table), (64, 1, 0, table), (31, 1, 1, table), (32, 1, 0, table + 1)):
        spans = Spans(torch.tensor([start]), count * one, torch.tensor([offset]), ids, one)
        with pytest.raises(ValueError, match="sequence 0"):
            kernels.requantize(LAYER, pool, spans, row, row)
    spans = Spans(0 * one, one, 0 * one, table, one)
    with pytest.raises(ValueError, match=r"v is \(2, 1, 64\); expected \(1, 1, 64\)"):
        kernels.requantize(LAYER, pool, spans, row, torch.cat((row, row)))
    with pytest.raises(ValueError, match="k has the wrong dtype"):
        kernels.requantize(LAYER, pool, spans, row.float(), row)
