"""Attention over uncompressed pages: every instruction path of the processor against the definition in torch."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu, load
from hack_kernels.base import BackendUnavailable, HackKernels, HackPages, Spans
from torch import Tensor

try:
    ISAS = cpu.supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

HEADS = 2
SHAPES = [(32, 64), (64, 96), (64, 128), (128, 256)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Relative error of the outputs: FP32 sums in another order, else the rounding of the dtype."""


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> cpu.CpuKernels:
    return cpu.CpuKernels(request.param, threads=2)


class Case:
    """Sequences of given lengths, pages in shuffled order; rows from the last full page on stand in open pages too."""

    def __init__(self, page_tokens: int, head_dim: int, lengths: list[int], dtype: torch.dtype) -> None:
        self.page_tokens, self.lengths, self.dtype, self.head_dim = page_tokens, lengths, dtype, head_dim
        generator = torch.Generator().manual_seed(page_tokens + head_dim)

        def rows(n: int, heads: int) -> Tensor:
            return torch.randn((n, heads, head_dim), generator=generator).to(dtype)

        self.k, self.v = ([rows(n, HEADS).half() for n in lengths] for _ in range(2))
        self.rows = rows
        counts = [n // page_tokens for n in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        self.table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int64)
        for b, count in enumerate(counts):
            self.table[b, :count] = torch.tensor([order.pop() for _ in range(count)])

    def pages(self, kernels: HackKernels) -> HackPages:
        pi = self.page_tokens
        pages = kernels.new_rows(sum(n // pi for n in self.lengths) + 1, HEADS, pi, self.head_dim)
        for b, n in enumerate(self.lengths):
            for plane, x in ((pages["k"], self.k[b]), (pages["v"], self.v[b])):
                full = x[: n // pi * pi].unflatten(0, (-1, pi)).transpose(1, 2)
                plane[self.table[b, : n // pi]] = full
        return pages

    def open_pages(self, begins: list[int]) -> tuple[Tensor, Tensor]:
        """The rows of page `begin // Π` before `begin`."""
        pi = self.page_tokens
        open_k, open_v = (torch.zeros(len(begins), HEADS, pi, self.head_dim, dtype=torch.float16) for _ in range(2))
        for b, begin in enumerate(begins):
            first = begin // pi * pi
            for pool, x in ((open_k, self.k[b]), (open_v, self.v[b])):
                pool[b, :, : begin - first] = x[first:begin].transpose(0, 1)
        return open_k, open_v

    def prefill(self, kernels: HackKernels, begins: list[int], q: Tensor) -> Tensor:
        starts = torch.tensor(begins)
        counts = torch.tensor(self.lengths) - starts
        spans = Spans(starts, counts, counts.cumsum(0) - counts, self.table, torch.arange(len(begins)))
        new = (torch.cat([x[begin:] for x, begin in zip(xs, begins, strict=True)]) for xs in (self.k, self.v))
        return kernels.attn_rows(self.pages(kernels), *self.open_pages(begins), spans, q, *new)

    def decode(self, kernels: HackKernels, q: Tensor) -> Tensor:
        """The query is the last row; where it fills a page, that page still stands whole in the open one."""
        pi, batch = self.page_tokens, len(self.lengths)
        open_k, open_v = self.open_pages([n - 1 for n in self.lengths])
        for b, n in enumerate(self.lengths):
            open_k[b, :, (n - 1) % pi], open_v[b, :, (n - 1) % pi] = self.k[b][-1], self.v[b][-1]
        order, ones = torch.arange(batch), torch.ones(batch, dtype=torch.int64)
        spans = Spans(torch.tensor(self.lengths) - 1, ones, order, self.table, order)
        return kernels.attn_rows(self.pages(kernels), open_k, open_v, spans, q)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 14])
@pytest.mark.parametrize(("page_tokens", "head_dim"), SHAPES)
def test_rows_agree_with_the_reference(
    kernels: cpu.CpuKernels, page_tokens: int, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Ragged lengths around page boundaries, queries that begin inside a page, one long enough to be split."""
    pi = page_tokens
    assert cpu.takes_rows(page_tokens, head_dim)
    case, reference = Case(page_tokens, head_dim, [1, pi, pi + 1, 9 * pi + 5], dtype), load("reference")
    begins = [0, 3, pi, 8 * pi + 2]
    q = case.rows(sum(case.lengths) - sum(begins), HEADS * group)
    out, last = case.prefill(kernels, begins, q), case.rows(len(case.lengths), HEADS * group)
    assert out.dtype is dtype
    assert relative(out, case.prefill(reference, begins, q)) < TOLERANCE[dtype]
    assert relative(case.decode(kernels, last), case.decode(reference, last)) < TOLERANCE[dtype]


@pytest.mark.parametrize("magnitude", [2.0**-20, 60000.0])
def test_any_fp16_value_is_taken(kernels: cpu.CpuKernels, magnitude: float) -> None:
    case, reference = Case(64, 128, [200], torch.bfloat16), load("reference")
    case.v[0] = (case.v[0].clamp(-1, 1).float() * magnitude).half()
    q = case.rows(200, HEADS * 4)
    assert relative(case.prefill(kernels, [0], q), case.prefill(reference, [0], q)) < TOLERANCE[torch.bfloat16]


def test_shapes_without_a_kernel_go_to_the_reference() -> None:
    kernels, reference = cpu.CpuKernels(threads=2), load("reference")
    case = Case(24, 80, [50], torch.float32)
    assert not cpu.takes_rows(24, 80)
    q = case.rows(1, HEADS * 2)
    assert torch.equal(case.decode(kernels, q), case.decode(reference, q))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_inputs_are_named(backend: str) -> None:
    kernels, case = load(backend), Case(32, 64, [40], torch.float32)
    with pytest.raises(ValueError, match=r"q is \(1, 3, 64\)"):
        case.decode(kernels, case.rows(1, 3))
    case.table[0, 0] = 99
    with pytest.raises((ValueError, IndexError), match=r"99|sequence 0"):
        case.decode(kernels, case.rows(1, 2))
