"""Attention over uncompressed pages: every instruction set of the CPU against the definition in torch."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import BACKENDS, cpu, load
from hack_kernels.base import Backend, BackendUnavailable, PageKernels, Pool, Rows, Spans
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.pools import new_pool
from hack_kernels.reference.rows import RowReference
from hack_kernels.row_format import RowFormat
from hack_kernels.window import OWN_PAGE_ONLY, Window
from torch import Tensor

from tests.hack_kernels.pools import CPU

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

HEADS = 2
SHAPES = [(32, 64), (32, 80), (64, 96), (64, 128), (128, 256)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Relative error of the outputs: FP32 sums in another order, else the rounding of the dtype."""


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> cpu.CpuBackend:
    return cpu.CpuBackend(request.param, threads=2)


class Case:
    """Sequences of given lengths, with pages in shuffled order. Rows from the last full page on are also in open
    pages."""

    def __init__(
        self,
        page_tokens: int,
        head_dim: int,
        lengths: list[int],
        dtype: torch.dtype,
        window: Window = OWN_PAGE_ONLY,
    ) -> None:
        self.page_tokens, self.lengths, self.dtype, self.head_dim = page_tokens, lengths, dtype, head_dim
        self.fmt = RowFormat(head_dim, page_tokens, window=window)
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

    def kernels(self, backend: Backend) -> PageKernels:
        return backend.kernels_for(self.fmt, RowReference)

    def pool(self, kernels: PageKernels, begins: list[int]) -> Pool:
        """A pool with all full pages. Slot b has the rows before `begins[b]` that the window keeps: at least those of
        page `begins[b] // Π`."""
        pi, fmt = self.page_tokens, self.fmt
        pool = new_pool(fmt, kernels, CPU, sum(n // pi for n in self.lengths) + 1, len(begins), range(HEADS))
        for b, (n, begin) in enumerate(zip(self.lengths, begins, strict=True)):
            if full := n // pi:
                k, v = (x[b][: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (self.k, self.v))
                kernels.seal(0, pool, self.table[b, :full], torch.arange(full) * pi, k, v)
            for page in (*fmt.window.earlier(begin // pi), begin // pi):
                first, stop = page * pi, min(begin, (page + 1) * pi)
                at = fmt.window.place(page) * pi
                for open_rows, x in ((pool.open_k, self.k[b]), (pool.open_v, self.v[b])):
                    open_rows[b, :, at : at + stop - first] = x[first:stop].transpose(0, 1)
        return pool

    def prefill(self, backend: Backend, begins: list[int], q: Tensor) -> Tensor:
        starts = torch.tensor(begins)
        counts = torch.tensor(self.lengths) - starts
        spans = Spans(starts, counts, counts.cumsum(0) - counts, self.table, torch.arange(len(begins)))
        new = (torch.cat([x[begin:] for x, begin in zip(xs, begins, strict=True)]) for xs in (self.k, self.v))
        kernels = self.kernels(backend)
        return kernels.attend(0, self.pool(kernels, begins), spans, Rows(q, *new))

    def decode(self, backend: Backend, q: Tensor) -> Tensor:
        """Decode with the last row as query. If it fills a page, that page is still whole in the open page."""
        pi, batch = self.page_tokens, len(self.lengths)
        kernels = self.kernels(backend)
        pool = self.pool(kernels, [n - 1 for n in self.lengths])
        for b, n in enumerate(self.lengths):
            at = self.fmt.window.place((n - 1) // pi) * pi + (n - 1) % pi
            pool.open_k[b, :, at], pool.open_v[b, :, at] = self.k[b][-1], self.v[b][-1]
        order, ones = torch.arange(batch), torch.ones(batch, dtype=torch.int64)
        spans = Spans(torch.tensor(self.lengths) - 1, ones, order, self.table, order)
        return kernels.attend(0, pool, spans, Rows(q))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.grid
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 14])
@pytest.mark.parametrize(("page_tokens", "head_dim"), SHAPES)
def test_rows_agree_with_the_reference(
    backend: cpu.CpuBackend, page_tokens: int, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Lengths are around page boundaries, queries begin inside a page, and one sequence is long enough to be split."""
    pi = page_tokens
    case, reference = Case(page_tokens, head_dim, [1, pi, pi + 1, 9 * pi + 5], dtype), load("reference")
    assert case.kernels(backend).served_by == "cpu"
    begins = [0, 3, pi, 8 * pi + 2]
    q = case.rows(sum(case.lengths) - sum(begins), HEADS * group)
    out, last = case.prefill(backend, begins, q), case.rows(len(case.lengths), HEADS * group)
    assert out.dtype is dtype
    assert relative(out, case.prefill(reference, begins, q)) < TOLERANCE[dtype]
    assert relative(case.decode(backend, last), case.decode(reference, last)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [Window(1, 2), Window(2, 0), Window(0, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_window_changes_where_rows_lie_and_no_output(name: str, dtype: torch.dtype, window: Window) -> None:
    """The comparison is the definition without a window, in prefill and decode. Triton's kernel is interpreted."""
    pi, lengths, begins = 32, [1, 32, 33, 9 * 32 + 5, 4 * 32], [0, 3, 32, 8 * 32 + 2, 2 * 32]
    case, plain = Case(pi, 64, lengths, dtype, window), Case(pi, 64, lengths, dtype)
    if name == "triton":
        pytest.importorskip("triton")
    backend, reference = load(name), load("reference")
    assert case.kernels(backend).served_by == name
    q, last = case.rows(sum(lengths) - sum(begins), HEADS * 3), case.rows(len(lengths), HEADS * 3)
    assert relative(case.prefill(backend, begins, q), plain.prefill(reference, begins, q)) < TOLERANCE[dtype]
    assert relative(case.decode(backend, last), plain.decode(reference, last)) < TOLERANCE[dtype]


def test_pages_that_are_not_their_rows_take_no_window() -> None:
    with pytest.raises(ValueError, match="window: pages of rows"):
        RowFormat(64, 32, exact=False, window=Window(1, 0))


@pytest.mark.parametrize("magnitude", [2.0**-20, 60000.0])
def test_any_fp16_value_is_taken(backend: cpu.CpuBackend, magnitude: float) -> None:
    case, reference = Case(64, 128, [200], torch.bfloat16), load("reference")
    case.v[0] = (case.v[0].clamp(-1, 1).float() * magnitude).half()
    q = case.rows(200, HEADS * 4)
    assert relative(case.prefill(backend, [0], q), case.prefill(reference, [0], q)) < TOLERANCE[torch.bfloat16]


def test_shapes_without_a_kernel_go_to_the_reference() -> None:
    backend, reference = cpu.CpuBackend(threads=2), load("reference")
    case = Case(24, 80, [50], torch.float32)
    assert case.kernels(backend).served_by == "reference"
    q = case.rows(1, HEADS * 2)
    assert torch.equal(case.decode(backend, q), case.decode(reference, q))


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_wrong_inputs_are_named(name: str) -> None:
    backend, case = load(name), Case(32, 64, [40], torch.float32)
    with pytest.raises(ValueError, match=r"q is \(1, 3, 64\)"):
        case.decode(backend, case.rows(1, 3))
    case.table[0, 0] = 99
    with pytest.raises((ValueError, IndexError), match=r"99|sequence 0"):
        case.decode(backend, case.rows(1, 2))
