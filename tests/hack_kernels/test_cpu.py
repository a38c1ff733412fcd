"""The C++ backend under every instruction path: codes to the bit, attention within the error of BF16 torch."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hack_kernels import cpu, load
from hack_kernels.base import (
    Arithmetic,
    BackendUnavailable,
    HackFormat,
    HackKernels,
    HackPages,
    OpenPage,
    Rounding,
    Spans,
)
from hack_kernels.quantize import unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = cpu.supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

FORMATS = [
    HackFormat(d, pi, kb, vb, rounding=r, arithmetic=a, open_page=o, seed=2**40 + 7)
    for (d, pi), (kb, vb), r, (a, o) in itertools.product(
        [(64, 32), (96, 64), (128, 64), (256, 128)],
        [(2, 2), (4, 2), (2, 4), (4, 4)],
        Rounding,
        [(Arithmetic.SYMMETRIC, OpenPage.EXACT), (Arithmetic.ASYMMETRIC, OpenPage.K_CODES)],
    )
]

ATTENTION_FORMATS = [
    HackFormat(64, 32, 2, 4, arithmetic=Arithmetic.ASYMMETRIC),
    HackFormat(96, 64, 4, 2),
    HackFormat(96, 32, 2, 2, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False),
    HackFormat(128, 64, 2, 2),
    HackFormat(128, 128, 4, 4, Rounding.STOCHASTIC, Arithmetic.ASYMMETRIC, open_page=OpenPage.K_CODES, seed=11),
    HackFormat(256, 128, 2, 2, Rounding.STOCHASTIC, open_page=OpenPage.K_CODES),
    HackFormat(128, 64, 2, 2, open_page=OpenPage.REQUANTIZE),
    HackFormat(96, 32, 4, 2, Rounding.STOCHASTIC, Arithmetic.ASYMMETRIC, open_page=OpenPage.REQUANTIZE),
    HackFormat(64, 128, 2, 4, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False, open_page=OpenPage.REQUANTIZE),
]


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> cpu.CpuKernels:
    return cpu.CpuKernels(request.param, threads=2)


def random_rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Sequences of given lengths in one pool, pages in shuffled order, and what a call needs of them."""

    def __init__(self, fmt: HackFormat, lengths: list[int], heads: int, seed: int = 0) -> None:
        pi, d = fmt.page_tokens, fmt.head_dim
        self.fmt, self.lengths, self.heads = fmt, lengths, heads
        self.k = [random_rows(seed + 2 * i, n, heads, d).half() for i, n in enumerate(lengths)]
        self.v = [random_rows(seed + 2 * i + 1, n, heads, d).half() for i, n in enumerate(lengths)]
        coded = pi - 1 if fmt.open_page is OpenPage.REQUANTIZE else 0  # there the open page rests as codes, too
        counts = [(n + coded) // pi for n in lengths]
        total = sum(counts)
        shuffled = torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed)).tolist()
        self.table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int64)
        for b, count in enumerate(counts):
            for p in range(count):
                self.table[b, p] = shuffled.pop()
        self.num_pages = total + 1
        self.open_k, self.open_v = (torch.zeros(len(lengths), heads, pi, d, dtype=torch.float16) for _ in range(2))

    def pool(self, kernels: HackKernels, layer: int = 3) -> HackPages:
        fmt, pi = self.fmt, self.fmt.page_tokens
        pages = kernels.new_pages(fmt, self.num_pages, self.heads)
        if fmt.open_page is OpenPage.REQUANTIZE:
            kernels.requantize(
                fmt, layer, pages, self.spans([0] * len(self.lengths)), *map(torch.cat, (self.k, self.v))
            )
            return pages
        for b, n in enumerate(self.lengths):
            full = n // pi
            if full:
                starts = torch.arange(full) * pi
                k, v = (x[b][: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (self.k, self.v))
                kernels.seal(fmt, layer, pages, self.table[b, :full], starts, k, v)
        return pages

    def decode_spans(self) -> Spans:
        """The last row of every sequence is the query; it stands in the open page."""
        pi, batch = self.fmt.page_tokens, len(self.lengths)
        for b, n in enumerate(self.lengths):
            begin = (n - 1) // pi * pi
            self.open_k[b, :, : n - begin] = self.k[b][begin:].transpose(0, 1)
            self.open_v[b, :, : n - begin] = self.v[b][begin:].transpose(0, 1)
        starts = torch.tensor(self.lengths) - 1
        ones, order = torch.ones(batch, dtype=torch.int64), torch.arange(batch)
        return Spans(starts, ones, order, self.table, order)

    def prefill(self, kernels: HackKernels, pages: HackPages, q: list[Tensor], begins: list[int]) -> Tensor:
        """Rows begins[b].. of every sequence, in one batch."""
        pi = self.fmt.page_tokens
        for b, begin in enumerate(begins):
            first = begin // pi * pi
            self.open_k[b, :, : begin - first] = self.k[b][first:begin].transpose(0, 1)
            self.open_v[b, :, : begin - first] = self.v[b][first:begin].transpose(0, 1)
        rows = (torch.cat([x[begin:] for x, begin in zip(xs, begins, strict=True)]) for xs in (q, self.k, self.v))
        return kernels.attn_prefill(self.fmt, 3, pages, self.open_k, self.open_v, self.spans(begins), *rows)

    def spans(self, begins: list[int]) -> Spans:
        """Rows begins[b].. of every sequence."""
        starts = torch.tensor(begins)
        counts = torch.tensor(self.lengths) - starts
        return Spans(starts, counts, counts.cumsum(0) - counts, self.table, torch.arange(len(begins)))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_equal_the_reference(kernels: cpu.CpuKernels, fmt: HackFormat) -> None:
    case = Case(fmt, [3 * fmt.page_tokens], heads=2)
    ids = case.table[0, [2, 0, 1]]
    ours, theirs = (k.export(fmt, case.pool(k), ids) for k in (kernels, load("reference")))
    assert ours.keys() == theirs.keys()
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-14, 1e-3, 300.0, 15000.0])
def test_bytes_equal_the_reference_at_extreme_scales(kernels: cpu.CpuKernels, scale: float) -> None:
    fmt = HackFormat(64, 32, 2, 4, rounding=Rounding.STOCHASTIC)
    case = Case(fmt, [64], heads=1)
    case.k, case.v = ([(x[0].float() * scale).clamp(-65504, 65504).half()] for x in (case.k, case.v))
    ids = case.table[0, :2]
    ours, theirs = (k.export(fmt, case.pool(k), ids) for k in (kernels, load("reference")))
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


def test_a_minimum_of_zero_is_positive_whichever_zeros_stand_in_the_partition(kernels: cpu.CpuKernels) -> None:
    """-0 and +0 compare equal, so which of them a minimum finds first depends on the order of the comparisons."""
    fmt = HackFormat(64, 32)
    case = Case(fmt, [64], heads=2)
    for rows in (case.k[0], case.v[0]):
        signs = random_rows(3, *rows.shape)
        rows.copy_(torch.where(signs > 0.5, rows.abs(), torch.where(signs > 0, 0.0, -0.0).half()))
    ids = case.table[0, :2]
    ours, theirs = (k.export(fmt, case.pool(k), ids) for k in (kernels, load("reference")))
    for name, plane in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), plane.view(torch.uint8)), name
    assert not bool(theirs["k_min"].signbit().any() or theirs["v_min"].signbit().any())


def requantized(
    kernels: HackKernels, fmt: HackFormat, batches: list[list[int]], scale: float = 1.0
) -> Iterator[HackPages]:
    """Every plane in wire order after each batch, which appends batches[i][b] rows to sequence b.

    The pool held other pages before.
    """
    width = -(-sum(max(batch) for batch in batches) // fmt.page_tokens)
    sequences, heads = len(batches[0]), 2
    ids = torch.arange(sequences * width)
    pages, stale = (
        kernels.new_pages(fmt, ids.numel(), heads),
        random_rows(1, ids.numel(), heads, *page_shape(fmt)).half(),
    )
    kernels.seal(fmt, 3, pages, ids, ids * fmt.page_tokens, stale, stale)
    starts = torch.zeros(sequences, dtype=torch.int64)
    for nth, batch in enumerate(batches):
        taking = torch.tensor(batch).nonzero()[:, 0]
        counts = torch.tensor(batch)[taking]
        offsets = counts.cumsum(0) - counts
        spans = Spans(starts[taking], counts, offsets, ids.view(sequences, width).flip(1)[taking], taking)
        k, v = (scale * random_rows(seed + 2 * nth, sum(batch), heads, fmt.head_dim) for seed in (2, 3))
        kernels.requantize(fmt, 3, pages, spans, *(x.clamp(-65504, 65504).half() for x in (k, v)))
        starts[taking] += counts
        yield kernels.export(fmt, pages, ids)


def page_shape(fmt: HackFormat) -> tuple[int, int]:
    return fmt.page_tokens, fmt.head_dim


def assert_requantized_alike(
    kernels: HackKernels, fmt: HackFormat, batches: list[list[int]], scale: float = 1.0
) -> None:
    for ours, theirs in zip(*(requantized(k, fmt, batches, scale) for k in (kernels, load("reference"))), strict=True):
        for name, plane in theirs.items():
            assert torch.equal(ours[name].view(torch.uint8), plane.view(torch.uint8)), name


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_requantized_bytes_equal_the_reference(kernels: cpu.CpuKernels, fmt: HackFormat) -> None:
    """A page grows by one row, by several and to its end, and the next one begins."""
    assert_requantized_alike(kernels, fmt, [[fmt.page_tokens - 7], [1], [1], [9], [fmt.page_tokens]])


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-14, 300.0, 40000.0])
def test_requantized_bytes_equal_the_reference_at_extreme_scales(kernels: cpu.CpuKernels, scale: float) -> None:
    """At the largest ones s·code + m passes what FP16 holds."""
    fmt = HackFormat(64, 32, 4, 2, rounding=Rounding.STOCHASTIC)
    assert_requantized_alike(kernels, fmt, [[20], [1], [1], [1]], scale)


@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_batch_is_requantized_as_by_the_reference(isa: str, data: st.DataObject) -> None:
    """Sequences that take no rows, some, or many pages at once."""
    kernels = cpu.CpuKernels(isa, threads=data.draw(st.sampled_from([1, 3])))
    fmt = data.draw(st.sampled_from(FORMATS))
    rows = st.integers(0, 3) | st.integers(0, 2 * fmt.page_tokens)
    sequences = data.draw(st.integers(1, 3))
    batch = st.lists(rows, min_size=sequences, max_size=sequences).filter(any)
    assert_requantized_alike(kernels, fmt, data.draw(st.lists(batch, min_size=1, max_size=4)))


@pytest.mark.parametrize("fmt", ATTENTION_FORMATS, ids=str)
@pytest.mark.parametrize("group", [1, 7])
def test_attention_agrees_with_the_reference(kernels: cpu.CpuKernels, fmt: HackFormat, group: int) -> None:
    """Ragged lengths around page boundaries, one of them without sealed pages; queries begin inside a page."""
    pi = fmt.page_tokens
    lengths = [1, pi - 1, pi, pi + 1, 2 * pi + 5]
    case = Case(fmt, lengths, heads=2)
    reference = load("reference")
    ours, theirs = case.pool(kernels), case.pool(reference)
    q = [random_rows(50 + b, n, 2 * group, fmt.head_dim) for b, n in enumerate(lengths)]
    begins = [0, 3, 0, pi, pi + 2]
    assert relative(case.prefill(kernels, ours, q, begins), case.prefill(reference, theirs, q, begins)) < 2e-3
    spans, last = case.decode_spans(), torch.cat([x[-1:] for x in q])
    rows = (case.open_k, case.open_v, spans, last)
    assert relative(kernels.attn_decode(fmt, 3, ours, *rows), reference.attn_decode(fmt, 3, theirs, *rows)) < 2e-3


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
def test_error_is_at_most_twice_that_of_bf16_torch(kernels: cpu.CpuKernels, group: int) -> None:
    """Against FP32 attention on the same codes, dequantized; torch computes on them in BF16."""
    fmt = HackFormat(128, 64)
    case = Case(fmt, [300], heads=2)
    pages = case.pool(kernels)
    spans = case.decode_spans()
    k, v = dequantized(case, kernels.export(fmt, pages, case.table[0, :4]))
    ours, low = 0.0, 0.0
    for seed in range(8):
        q = random_rows(9 + seed, 1, 2 * group, 128)
        out = kernels.attn_decode(fmt, 3, pages, case.open_k, case.open_v, spans, q)
        exact = attention(q, k, v)
        ours += relative(out, exact)
        low += relative(attention(q.bfloat16(), k.bfloat16(), v.bfloat16()), exact)
    assert ours <= 2 * low


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_has_the_dtype_of_the_queries(kernels: cpu.CpuKernels, dtype: torch.dtype) -> None:
    fmt = HackFormat(96, 32)
    case = Case(fmt, [100], heads=2)
    pages, spans = case.pool(kernels), case.decode_spans()
    q = random_rows(9, 1, 6, 96).to(dtype)
    rows = (case.open_k, case.open_v, spans)
    out = kernels.attn_decode(fmt, 3, pages, *rows, q)
    assert torch.equal(out, kernels.attn_decode(fmt, 3, pages, *rows, q.float()).to(dtype))


def dequantized(case: Case, wire: HackPages) -> tuple[Tensor, Tensor]:
    """K^ and V^ [n, Hkv, D] FP32 of the case's only sequence, own page exact."""
    fmt, n = case.fmt, case.lengths[0]
    k = unpack(wire["k_codes"], fmt.k_bits, -2).unflatten(-1, (fmt.k_groups, fmt.k_partition)).float()
    k = (k * wire["k_scale"].float()[..., None] + wire["k_min"].float()[..., None]).flatten(-2)
    v = unpack(wire["v_codes"], fmt.v_bits, -1).float() * wire["v_scale"].float()[..., None]
    v = (v + wire["v_min"].float()[..., None]).transpose(-1, -2)
    sealed = n // fmt.page_tokens * fmt.page_tokens
    keys = torch.cat((k.flatten(1, 2).transpose(0, 1), case.k[0][sealed:].float()))
    values = torch.cat((v.flatten(1, 2).transpose(0, 1), case.v[0][sealed:].float()))
    return keys, values


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [1, Hq, D] over k, v [n, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) / math.sqrt(q.shape[2])
    return (torch.softmax(scores, -1) @ values).transpose(0, 1)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_result_is_independent_of_threads_and_splits(kernels: cpu.CpuKernels, arithmetic: Arithmetic) -> None:
    """One long sequence, split among many threads; and every sequence of a batch alone."""
    fmt = HackFormat(64, 32, arithmetic=arithmetic)
    case = Case(fmt, [2000, 40, 700], heads=2)
    pages, spans = case.pool(kernels), case.decode_spans()
    q = random_rows(5, 3, 8, 64)
    kernels.threads = 1
    alone = kernels.attn_decode(fmt, 3, pages, case.open_k, case.open_v, spans, q)
    for threads in (2, 3, 7):
        kernels.threads = threads
        assert relative(kernels.attn_decode(fmt, 3, pages, case.open_k, case.open_v, spans, q), alone) < 1e-6
    for b in range(3):
        only = slice(b, b + 1)
        one = Spans(spans.starts[only], spans.counts[only], torch.tensor([0]), case.table[only], spans.slots[only])
        out = kernels.attn_decode(fmt, 3, pages, case.open_k, case.open_v, one, q[b : b + 1])
        assert relative(out, alone[b : b + 1]) < 1e-6


def test_chunks_of_a_prompt_give_what_the_whole_gives(kernels: cpu.CpuKernels) -> None:
    fmt = HackFormat(64, 32)
    case = Case(fmt, [333], heads=1)
    pages = case.pool(kernels)
    q = random_rows(6, 333, 5, 64)
    whole = case.prefill(kernels, pages, [q], [0])
    for begin in (1, 31, 32, 200, 332):
        assert relative(case.prefill(kernels, pages, [q], [begin]), whole[begin:]) < 1e-6


def test_bad_spans_are_named(kernels: cpu.CpuKernels) -> None:
    fmt = HackFormat(64, 32)
    case = Case(fmt, [70], heads=1)
    pages, spans = case.pool(kernels), case.decode_spans()
    q = random_rows(7, 1, 1, 64)
    broken = [
        Spans(spans.starts, spans.counts, spans.offsets, case.table + 99, spans.slots),
        Spans(spans.starts, spans.counts, spans.offsets, spans.table, spans.slots + 1),
        Spans(spans.starts + 4000, spans.counts, spans.offsets, spans.table, spans.slots),
        Spans(spans.starts, spans.counts, spans.offsets + 1, spans.table, spans.slots),
    ]
    for bad in broken:
        with pytest.raises(ValueError, match="sequence 0"):
            kernels.attn_decode(fmt, 3, pages, case.open_k, case.open_v, bad, q)


def test_bad_spans_and_rows_of_a_requantization_are_named(kernels: cpu.CpuKernels) -> None:
    fmt = HackFormat(64, 32, open_page=OpenPage.REQUANTIZE)
    pages, row = kernels.new_pages(fmt, 3, 1), torch.zeros(1, 1, 64, dtype=torch.float16)
    one, table = torch.tensor([1]), torch.tensor([[0, 2]])
    for start, count, offset, ids in ((-1, 1, 0, table), (64, 1, 0, table), (31, 1, 1, table), (32, 1, 0, table + 1)):
        spans = Spans(torch.tensor([start]), count * one, torch.tensor([offset]), ids, one)
        with pytest.raises(ValueError, match="sequence 0"):
            kernels.requantize(fmt, 3, pages, spans, row, row)
    spans = Spans(0 * one, one, 0 * one, table, one)
    with pytest.raises(ValueError, match=r"v is \(2, 1, 64\); expected \(1, 1, 64\)"):
        kernels.requantize(fmt, 3, pages, spans, row, torch.cat((row, row)))
    with pytest.raises(ValueError, match="k has the wrong dtype"):
        kernels.requantize(fmt, 3, pages, spans, row.float(), row)


def test_the_tensor_that_is_wrong_is_named(kernels: cpu.CpuKernels) -> None:
    """Of another dtype, without dimensions, or with gaps between its elements, where C++ takes it as it lies."""
    fmt = HackFormat(64, 32)
    case = Case(fmt, [70, 40], heads=2)
    pages, spans, row = case.pool(kernels), case.decode_spans(), torch.zeros(2, 2, 64, dtype=torch.float16)
    rows = {"open_k": case.open_k, "open_v": case.open_v, "q": random_rows(7, 2, 4, 64), "k": row, "v": row}
    where = {name: getattr(spans, name) for name in ("starts", "counts", "offsets", "table", "slots")}
    assert kernels.attn_prefill(fmt, 3, pages, spans=spans, **rows).shape == (2, 4, 64)
    for name, tensor in {**rows, **where}.items():
        broken = [tensor.flatten()[0]] if tensor.dim() > 1 else []
        if name != "q":  # which may have any dtype
            broken.append(tensor.bool())
        if name not in ("k", "v"):
            broken.append(torch.stack((tensor, tensor), -1)[..., 0])
        for wrong in broken:
            given_spans = Spans(**{**where, name: wrong}) if name in where else spans
            given_rows = {**rows, name: wrong} if name in rows else rows
            with pytest.raises(ValueError, match=rf"^{name} "):
                kernels.attn_prefill(fmt, 3, pages, spans=given_spans, **given_rows)
    with pytest.raises(ValueError, match="k and v are given together"):
        kernels.attn_rows({"k": case.open_k, "v": case.open_v}, case.open_k, case.open_v, spans, rows["q"], k=row)


def test_an_instruction_set_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match=r"'sve9'; it runs .*portable"):
        cpu.CpuKernels("sve9")
    monkeypatch.setenv(cpu.ISA_VARIABLE, "sve9")
    with pytest.raises(BackendUnavailable, match="sve9"):
        load("cpu")
    monkeypatch.setenv(cpu.ISA_VARIABLE, "portable")
    assert load("cpu").isa == "portable"


def test_an_extension_older_than_its_sources_is_refused(tmp_path: Path) -> None:
    digest = cpu.extension().SOURCES
    shutil.copytree(cpu.SOURCES, tmp_path, dirs_exist_ok=True)
    cpu.check_built_from(tmp_path, digest)
    with (tmp_path / "simd" / "portable.h").open("a") as header:
        header.write("// changed\n")
    with pytest.raises(ImportError, match=r"pip install -e \."):
        cpu.check_built_from(tmp_path, digest)
    cpu.check_built_from(tmp_path / "not a checkout", digest)


def test_threads_must_be_positive(kernels: cpu.CpuKernels) -> None:
    with pytest.raises(ValueError, match="threads"):
        kernels.threads = 0


@pytest.mark.parametrize("num_pages", [0, 3, 700])
def test_planes_of_a_pool_are_zero_apart_and_aligned(num_pages: int) -> None:
    """Also where all of them lie in one block of huge pages."""
    fmt = HackFormat(96, 32)
    planes = cpu.CpuKernels().new_pages(fmt, num_pages, 3)
    assert planes.keys() == fmt.plane_specs().keys()
    for name, (shape, dtype) in fmt.plane_specs().items():
        plane = planes[name]
        assert (plane.shape, plane.dtype) == ((num_pages, 3, *shape), dtype)
        assert plane.is_contiguous()
        assert not plane.any()
        assert num_pages < 700 or plane.data_ptr() % cpu.LINE_BYTES == 0
        plane.view(torch.uint8).fill_(255)  # the next plane is found zero only if they do not overlap
