"""Seal, install, export and prefill as Triton interprets them, against the reference: codes bit for bit, odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hack_kernels.base import (
    SUM_PLANES,
    Arithmetic,
    BackendUnavailable,
    HackFormat,
    HackPages,
    OpenPage,
    Rounding,
    Spans,
)
from hack_kernels.reference import ReferenceKernels
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

import triton
from hack_kernels.triton import backend, layout
from hack_kernels.triton.backend import PREFILL_VARIABLE, Prefill, TritonKernels

CPU = torch.device("cpu")
SEED = 2**63 + 12345
ASYMMETRIC, STOCHASTIC = Arithmetic.ASYMMETRIC, Rounding.STOCHASTIC
SEALED = [
    HackFormat(64, 32, 2, 2),
    HackFormat(96, 32, 2, 4, arithmetic=ASYMMETRIC),
    HackFormat(96, 128, 4, 2, rounding=STOCHASTIC, seed=SEED),
    HackFormat(128, 64, 2, 2, rounding=STOCHASTIC, arithmetic=ASYMMETRIC, seed=SEED),
    HackFormat(128, 128, 2, 4, arithmetic=ASYMMETRIC),
    HackFormat(256, 64, 4, 4, rounding=STOCHASTIC, seed=1),
    HackFormat(256, 32, 2, 2, arithmetic=ASYMMETRIC),
]


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def poisoned(fmt: HackFormat, pages: int, heads: int) -> HackPages:
    """A pool in which nothing is what `new_pages` would leave there."""
    pool = layout.new_pages(fmt, pages, heads, "cpu")
    torch.empty(0, dtype=torch.uint8).set_(pool["k_codes"].untyped_storage()).fill_(0xA5)
    return pool


def assert_same_bytes(got: HackPages, expected: HackPages) -> None:
    for name, plane in expected.items():
        ours = got[name].contiguous().flatten().view(torch.uint8)
        assert torch.equal(ours, plane.contiguous().flatten().view(torch.uint8)), name


@pytest.mark.parametrize("fmt", SEALED, ids=str)
def test_sealed_records_are_the_reference_s_bit_for_bit(fmt: HackFormat) -> None:
    """Also constant partitions, and steps so fine that they are subnormal in FP16; positions far into a sequence."""
    k, v = (rows(seed, 3, 2, fmt.page_tokens, fmt.head_dim) for seed in (1, 2))
    k[0, 0, 3], v[1, 1, :, 7] = 0.5, -0.25
    k[1] *= 1e-4
    v[2] *= 1e-5
    ids, starts = torch.tensor([4, 0, 2]), torch.tensor([0, 5, 2**20]) * fmt.page_tokens
    expected = ReferenceKernels().new_pages(fmt, 5, 2)
    ReferenceKernels().seal(fmt, 3, expected, ids, starts, k, v)
    pool = poisoned(fmt, 5, 2)
    untouched = {name: plane[[1, 3]].clone() for name, plane in pool.items()}
    TritonKernels(CPU).seal(fmt, 3, pool, ids, starts, k, v)
    native = layout.from_wire(fmt, {name: plane[ids] for name, plane in expected.items()})
    assert_same_bytes({name: plane[ids] for name, plane in pool.items()}, native)
    assert_same_bytes({name: plane[[1, 3]] for name, plane in pool.items()}, untouched)


def test_requantized_pages_are_the_reference_s_and_no_others_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sequence's table ends with a page 0 that is another's, who writes to it in the meantime."""
    fmt = HackFormat(64, 32, 2, 4, arithmetic=ASYMMETRIC, open_page=OpenPage.REQUANTIZE)
    pool, expected = poisoned(fmt, 5, 2), ReferenceKernels().new_pages(fmt, 5, 2)
    table, mine = torch.tensor([[4, 1], [3, 0]]), torch.tensor([4, 1, 3])
    requantize = ReferenceKernels.requantize

    def meanwhile(*arguments: Any) -> None:
        pool["k_codes"][0] += 1
        requantize(*arguments)

    for seed, starts, counts in ((11, [0, 0], [40, 5]), (13, [40, 5], [3, 1])):
        total, offsets = sum(counts), torch.tensor([0, counts[0]])
        spans = Spans(torch.tensor(starts), torch.tensor(counts), offsets, table, torch.arange(2))
        k, v = (rows(each, total, 2, fmt.head_dim) for each in (seed, seed + 1))
        ReferenceKernels().requantize(fmt, 3, expected, spans, k, v)
        others = {name: plane[[0, 2]].clone() for name, plane in pool.items()}
        others["k_codes"][0] += 1
        with monkeypatch.context() as patched:
            patched.setattr(ReferenceKernels, "requantize", meanwhile)
            TritonKernels(CPU).requantize(fmt, 3, pool, spans, k, v)
        native = layout.from_wire(fmt, {name: plane[mine] for name, plane in expected.items()})
        assert_same_bytes({name: plane[mine] for name, plane in pool.items()}, native)
        assert_same_bytes({name: plane[[0, 2]] for name, plane in pool.items()}, others)


EXCHANGED = [
    HackFormat(64, 32, arithmetic=ASYMMETRIC),  # several pages to a program
    HackFormat(96, 32, 2, 4, arithmetic=ASYMMETRIC),
    HackFormat(96, 64, 4, 2, arithmetic=ASYMMETRIC),
    HackFormat(64, 128, 4, 2),
]


@pytest.mark.parametrize("fmt", EXCHANGED, ids=str)
def test_any_bytes_survive_install_and_export(fmt: HackFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    wire = {}
    for name, (shape, dtype) in fmt.plane_specs().items():
        raw = torch.randint(0, 256, (1, 2, *shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        wire[name] = raw.view(dtype).squeeze(-1)
    pool, ids = poisoned(fmt, 3, 1), torch.tensor([2, 0])
    untouched = {name: plane[1].clone() for name, plane in pool.items()}
    kernels = TritonKernels(CPU)
    kernels.install(fmt, pool, ids, wire)
    native = layout.from_wire(fmt, {name: plane.transpose(0, 1) for name, plane in wire.items()})
    assert_same_bytes({name: plane[ids] for name, plane in pool.items()}, native)
    assert_same_bytes({name: plane[1] for name, plane in pool.items()}, untouched)
    assert_same_bytes(kernels.export(fmt, pool, ids), wire)

    if fmt.sums:
        kernels.install(fmt, pool, ids, {name: plane for name, plane in wire.items() if name not in SUM_PLANES})
        counted = ReferenceKernels().new_pages(fmt, 3, 1)
        ReferenceKernels().install(fmt, counted, ids, {n: x for n, x in wire.items() if n not in SUM_PLANES})
        assert_same_bytes(kernels.export(fmt, pool, ids), ReferenceKernels().export(fmt, counted, ids))


def ragged(fmt: HackFormat, kv_heads: int) -> tuple[Spans, Tensor, Tensor, int]:
    """Spans around page boundaries: with and without an open page, of very different lengths; open K, open V, rows."""
    pi = fmt.page_tokens
    pairs = [(pi - 4, 4), (pi, 1), (pi - 1, 2), (0, 1), (3 * pi - 2, 4), (0, pi - 1)]
    starts, counts = (torch.tensor(x) for x in zip(*pairs, strict=True))
    order = torch.arange(len(pairs))
    table = torch.arange(4 * len(pairs)).flip(0).view(len(pairs), 4)
    spans = Spans(starts, counts, counts.cumsum(0) - counts, table, order.flip(0))
    open_k, open_v = (rows(seed, len(pairs), kv_heads, pi, fmt.head_dim) for seed in (4, 5))
    return spans, open_k, open_v, int(counts.sum())


@pytest.mark.parametrize(
    ("fmt", "group", "dtype"),
    [
        (HackFormat(64, 32), 8, torch.bfloat16),
        (HackFormat(96, 64, 4, 2, arithmetic=ASYMMETRIC), 3, torch.float32),
        (HackFormat(256, 32, 4, 4, rounding=STOCHASTIC, seed=7, open_page=OpenPage.K_CODES), 7, torch.float32),
        (HackFormat(64, 32, arithmetic=ASYMMETRIC, stored_sums=False, open_page=OpenPage.K_CODES), 1, torch.float16),
    ],
    ids=str,
)
def test_prefill_of_a_ragged_batch_is_the_reference_s(fmt: HackFormat, group: int, dtype: torch.dtype) -> None:
    """In a pool of four KV heads, of which the call sees one or two. Weights near a rounding tie may turn."""
    heads = 2 if group < 7 else 1
    spans, open_k, open_v, total = ragged(fmt, heads)
    count = spans.table.numel()
    k_pages, v_pages = (rows(seed, count, heads, fmt.page_tokens, fmt.head_dim) for seed in (6, 7))
    ids, starts = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    expected_pool = ReferenceKernels().new_pages(fmt, count, heads)
    ReferenceKernels().seal(fmt, 1, expected_pool, ids, starts, k_pages, v_pages)
    pool = {name: plane[:, 1 : 1 + heads] for name, plane in poisoned(fmt, count, 4).items()}
    for name, plane in layout.from_wire(fmt, expected_pool).items():
        pool[name].copy_(plane)
    k, v = (rows(seed, total, heads, fmt.head_dim) for seed in (8, 9))
    q = rows(10, total, heads * group, fmt.head_dim).to(dtype)
    arguments = (open_k, open_v, spans, q, k, v)
    expected = ReferenceKernels().attn_prefill(fmt, 1, expected_pool, *arguments).float()
    out = TritonKernels(CPU).attn_prefill(fmt, 1, pool, *arguments).float()
    assert torch.isfinite(out).all()
    rounding = torch.finfo(dtype).eps
    assert float((out - expected).norm() / expected.norm()) <= 2e-3 + rounding


def test_exact_prefill_is_plain_attention_and_reads_what_was_cached() -> None:
    fmt = HackFormat(64, 32)
    kernels = TritonKernels(CPU, Prefill.EXACT)
    k, v, q = rows(11, 40, 1, 64), rows(12, 40, 1, 64), rows(13, 40, 3, 64).float()
    pool, empty = kernels.new_pages(fmt, 1, 1), torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    zero = torch.tensor([0])
    whole = Spans(zero, torch.tensor([40]), zero, torch.tensor([[0]]), zero)
    out = kernels.attn_prefill(fmt, 0, pool, empty, empty, whole, q, k, v)
    queries, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    plain = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    assert float((out - plain).norm() / plain.norm()) < 1e-2  # BF16

    kernels.seal(fmt, 0, pool, zero, zero, *(x[None, :32].transpose(1, 2) for x in (k, v)))
    rest = Spans(torch.tensor([32]), torch.tensor([8]), zero, torch.tensor([[0]]), zero)
    later = kernels.attn_prefill(fmt, 0, pool, empty, empty, rest, q[32:], k[32:], v[32:])
    wire = kernels.export(fmt, pool, zero)
    cached = ReferenceKernels().new_pages(fmt, 1, 1) | {name: x.transpose(0, 1) for name, x in wire.items()}
    homomorphic = ReferenceKernels().attn_prefill(fmt, 0, cached, empty, empty, rest, q[32:], k[32:], v[32:])
    assert float((later - homomorphic).norm() / homomorphic.norm()) < 2e-2  # Q and P in 8 bits, BF16


def test_devices_and_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFILL_VARIABLE, "fast")
    with pytest.raises(BackendUnavailable, match="is 'fast'; it must be one of homomorphic, exact"):
        backend.create()
    monkeypatch.delenv(PREFILL_VARIABLE)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="no CUDA device"):
            backend.create()
    fmt, ids = HackFormat(64, 32), torch.tensor([0])
    page = torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="k is on meta; the pages are on cpu"):
        TritonKernels(CPU).seal(fmt, 0, poisoned(fmt, 1, 1), ids, ids, page.to("meta"), page)
