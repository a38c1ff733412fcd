"""Seal, install, export and prefill, interpreted by Triton, against the reference: bit-equal codes, odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hack_kernels.base import BackendUnavailable, Planes, Pool, Rows, Spans
from hack_kernels.hack_format import SUM_PLANES, Arithmetic, HackFormat, HackKernels, OpenPage, Rounding
from hack_kernels.pools import new_pool
from hack_kernels.reference.hack import HackReference
from torch import Tensor

from tests.hack_kernels.pools import CPU, empty_pool, hack_kernels, reference

pytest.importorskip("triton")

import triton
from hack_kernels.triton import backend, layout
from hack_kernels.triton.backend import PREFILL_VARIABLE, Prefill, TritonBackend

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


def kernels_of(fmt: HackFormat, prefill: Prefill = Prefill.HOMOMORPHIC) -> HackKernels:
    return hack_kernels(TritonBackend(CPU, prefill), fmt)


def poisoned(fmt: HackFormat, pages: int, heads: int) -> Pool:
    """A pool whose sealed pages differ from those that `new_pages` makes."""
    pool = empty_pool(kernels_of(fmt), fmt, pages, heads)
    torch.empty(0, dtype=torch.uint8).set_(pool.planes["k_codes"].untyped_storage()).fill_(0xA5)
    return pool


def assert_same_bytes(got: Planes, expected: Planes) -> None:
    for name, plane in expected.items():
        ours = got[name].contiguous().flatten().view(torch.uint8)
        assert torch.equal(ours, plane.contiguous().flatten().view(torch.uint8)), name


@pytest.mark.parametrize("fmt", SEALED, ids=str)
def test_sealed_records_are_the_reference_s_bit_for_bit(fmt: HackFormat) -> None:
    """Cases include constant partitions, steps that are subnormal in FP16, and positions far into a sequence."""
    k, v = (rows(seed, 3, 2, fmt.page_tokens, fmt.head_dim) for seed in (1, 2))
    k[0, 0, 3], v[1, 1, :, 7] = 0.5, -0.25
    k[1] *= 1e-4
    v[2] *= 1e-5
    ids, starts = torch.tensor([4, 0, 2]), torch.tensor([0, 5, 2**20]) * fmt.page_tokens
    expected = empty_pool(reference(fmt), fmt, 5, 2)
    reference(fmt).seal(3, expected, ids, starts, k, v)
    pool = poisoned(fmt, 5, 2)
    untouched = {name: plane[[1, 3]].clone() for name, plane in pool.planes.items()}
    kernels_of(fmt).seal(3, pool, ids, starts, k, v)
    native = layout.from_wire(fmt, {name: plane[ids] for name, plane in expected.planes.items()})
    assert_same_bytes({name: plane[ids] for name, plane in pool.planes.items()}, native)
    assert_same_bytes({name: plane[[1, 3]] for name, plane in pool.planes.items()}, untouched)


@pytest.mark.parametrize("fmt", [fmt for fmt in SEALED if fmt.rounding is STOCHASTIC], ids=str)
def test_a_range_of_heads_is_sealed_as_among_all_of_them(fmt: HackFormat) -> None:
    """Noise is keyed by the model's heads. A worker with two of four heads gives the same bytes, in its own pool or in
    a view of a larger one."""
    k, v = (rows(seed, 2, 4, fmt.page_tokens, fmt.head_dim) for seed in (1, 2))
    ids, starts, part = torch.tensor([1, 0]), torch.tensor([0, 3]) * fmt.page_tokens, slice(1, 3)
    whole = empty_pool(reference(fmt), fmt, 2, 4)
    reference(fmt).seal(3, whole, ids, starts, k, v)
    expected = layout.from_wire(fmt, {name: plane[:, part] for name, plane in whole.planes.items()})
    own = new_pool(fmt, kernels_of(fmt), CPU, 2, 1, range(1, 3))
    for pool in (own, poisoned(fmt, 2, 4).heads(1, 2)):
        kernels_of(fmt).seal(3, pool, ids, starts, k[:, part], v[:, part])
        assert_same_bytes(pool.planes, expected)
    at_home = empty_pool(kernels_of(fmt), fmt, 2, 2)
    kernels_of(fmt).seal(3, at_home, ids, starts, k[:, part], v[:, part])
    assert not torch.equal(at_home.planes["k_codes"], own.planes["k_codes"]), "this test must see the wrong key"


def test_requantized_pages_are_the_reference_s_and_no_others_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sequence's table ends with page 0, which another sequence owns and writes in the meantime."""
    fmt = HackFormat(64, 32, 2, 4, arithmetic=ASYMMETRIC, open_page=OpenPage.REQUANTIZE)
    pool, expected = poisoned(fmt, 5, 2), empty_pool(reference(fmt), fmt, 5, 2)
    table, mine = torch.tensor([[4, 1], [3, 0]]), torch.tensor([4, 1, 3])
    requantize = HackReference.requantize

    def meanwhile(*arguments: Any) -> None:
        pool.planes["k_codes"][0] += 1
        requantize(*arguments)

    for seed, starts, counts in ((11, [0, 0], [40, 5]), (13, [40, 5], [3, 1])):
        total, offsets = sum(counts), torch.tensor([0, counts[0]])
        spans = Spans(torch.tensor(starts), torch.tensor(counts), offsets, table, torch.arange(2))
        k, v = (rows(each, total, 2, fmt.head_dim) for each in (seed, seed + 1))
        reference(fmt).requantize(3, expected, spans, k, v)
        others = {name: plane[[0, 2]].clone() for name, plane in pool.planes.items()}
        others["k_codes"][0] += 1
        with monkeypatch.context() as patched:
            patched.setattr(HackReference, "requantize", meanwhile)
            kernels_of(fmt).requantize(3, pool, spans, k, v)
        native = layout.from_wire(fmt, {name: plane[mine] for name, plane in expected.planes.items()})
        assert_same_bytes({name: plane[mine] for name, plane in pool.planes.items()}, native)
        assert_same_bytes({name: plane[[0, 2]] for name, plane in pool.planes.items()}, others)


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
    for plane in fmt.planes:
        shape = (1, 2, *plane.shape, plane.dtype.itemsize)
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        wire[plane.name] = raw.view(plane.dtype).squeeze(-1)
    pool, ids, kernels = poisoned(fmt, 3, 1), torch.tensor([2, 0]), kernels_of(fmt)
    untouched = {name: plane[1].clone() for name, plane in pool.planes.items()}
    kernels.install(pool, ids, wire)
    native = layout.from_wire(fmt, {name: plane.transpose(0, 1) for name, plane in wire.items()})
    assert_same_bytes({name: plane[ids] for name, plane in pool.planes.items()}, native)
    assert_same_bytes({name: plane[1] for name, plane in pool.planes.items()}, untouched)
    assert_same_bytes(kernels.export(pool, ids), wire)

    if fmt.sums:
        without = {name: plane for name, plane in wire.items() if name not in SUM_PLANES}
        kernels.install(pool, ids, without)
        counted = empty_pool(reference(fmt), fmt, 3, 1)
        reference(fmt).install(counted, ids, without)
        assert_same_bytes(kernels.export(pool, ids), reference(fmt).export(counted, ids))


def ragged(fmt: HackFormat, kv_heads: int) -> tuple[Spans, Tensor, Tensor, int]:
    """Spans around page boundaries, with and without an open page, of very different lengths; also open K, open V and
    the number of rows."""
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
    """The pool has four KV heads, of which the call sees one or two. Weights near a rounding tie may differ.

    Rows of the own page that are seen as codes have the noise of the model's heads, like sealed pages.
    """
    heads = 2 if group < 7 else 1
    spans, open_k, open_v, total = ragged(fmt, heads)
    count = spans.table.numel()
    k_pages, v_pages = (rows(seed, count, heads, fmt.page_tokens, fmt.head_dim) for seed in (6, 7))
    ids, starts = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    expected_pool = empty_pool(reference(fmt), fmt, count, heads)
    reference(fmt).seal(1, expected_pool, ids, starts, k_pages, v_pages)
    planes = {name: plane[:, 1 : 1 + heads] for name, plane in poisoned(fmt, count, 4).planes.items()}
    for name, plane in layout.from_wire(fmt, expected_pool.planes).items():
        planes[name].copy_(plane)
    k, v = (rows(seed, total, heads, fmt.head_dim) for seed in (8, 9))
    q = rows(10, total, heads * group, fmt.head_dim).to(dtype)
    batch = Rows(q, k, v)
    expected = reference(fmt).attend(1, Pool(expected_pool.planes, open_k, open_v, 1), spans, batch).float()
    out = kernels_of(fmt).attend(1, Pool(planes, open_k, open_v, 1), spans, batch).float()
    assert torch.isfinite(out).all()
    rounding = torch.finfo(dtype).eps
    assert float((out - expected).norm() / expected.norm()) <= 2e-3 + rounding


def test_devices_and_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFILL_VARIABLE, "fast")
    with pytest.raises(BackendUnavailable, match="is 'fast'; it must be one of homomorphic, dense"):
        backend.create()
    monkeypatch.delenv(PREFILL_VARIABLE)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="no CUDA device"):
            backend.create()
    fmt, ids = HackFormat(64, 32), torch.tensor([0])
    page = torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="k is on meta; the pages are on cpu"):
        kernels_of(fmt).seal(0, poisoned(fmt, 1, 1), ids, ids, page.to("meta"), page)
