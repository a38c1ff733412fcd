"""Attention on codes in C++: every instruction set of the CPU against the definition in torch."""

from __future__ import annotations

import math

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import Planes, Pool, Rows, Spans
from hack_kernels.hack_format import Arithmetic, HackFormat, OpenPage, Rounding
from hack_kernels.quantize import unpack
from torch import Tensor

from tests.hack_kernels.cpu.cases import LAYER, Case, relative
from tests.hack_kernels.pools import hack_kernels, random_rows, reference

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
    HackFormat(128, 64, 8, 8),
    HackFormat(64, 32, 2, 8),
    HackFormat(96, 32, 8, 8, Rounding.STOCHASTIC, Arithmetic.ASYMMETRIC, open_page=OpenPage.K_CODES, seed=11),
    HackFormat(256, 128, 8, 4, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=False),
    HackFormat(128, 128, 8, 8, arithmetic=Arithmetic.ASYMMETRIC, open_page=OpenPage.REQUANTIZE),
]


@pytest.mark.grid
@pytest.mark.parametrize("fmt", ATTENTION_FORMATS, ids=str)
@pytest.mark.parametrize("group", [1, 7])
def test_attention_agrees_with_the_reference(backend: cpu.CpuBackend, fmt: HackFormat, group: int) -> None:
    """Ragged lengths around page boundaries, one of them without sealed pages; queries begin inside a page."""
    pi = fmt.page_tokens
    lengths = [1, pi - 1, pi, pi + 1, 2 * pi + 5]
    case = Case(fmt, lengths, heads=2)
    kernels, definition = hack_kernels(backend, fmt), reference(fmt)
    ours, theirs = case.pool(kernels), case.pool(definition)
    q = [random_rows(50 + b, n, 2 * group, fmt.head_dim) for b, n in enumerate(lengths)]
    begins = [0, 3, 0, pi, pi + 2]
    assert relative(case.prefill(kernels, ours, q, begins), case.prefill(definition, theirs, q, begins)) < 2e-3
    spans, rows = case.decode_spans(ours, theirs), Rows(torch.cat([x[-1:] for x in q]))
    assert relative(kernels.attend(LAYER, ours, spans, rows), definition.attend(LAYER, theirs, spans, rows)) < 2e-3


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("group", [1, 5])
def test_the_largest_codes_and_weights_fit_every_product(
    backend: cpu.CpuBackend, arithmetic: Arithmetic, group: int
) -> None:
    """Nearly all codes are 255, Q is at its largest level, and so are all weights except those of one row of a page."""
    fmt = HackFormat(64, 32, 8, 8, arithmetic=arithmetic)
    case = Case(fmt, [97], heads=1)
    for x in (case.k[0], case.v[0]):
        x.fill_(2.0)
        x[..., ::32] = x[::32] = 0.0
    kernels, definition = hack_kernels(backend, fmt), reference(fmt)
    ours, theirs = case.pool(kernels), case.pool(definition)
    assert int(definition.export(theirs, case.table[0])["k_codes"].max()) == 255
    for sign in (1.0, -1.0):
        q = sign * torch.full((97, group, 64), 0.01)
        out, wanted = (case.prefill(x, pool, [q], [0]) for x, pool in ((kernels, ours), (definition, theirs)))
        assert relative(out, wanted) < 1e-3
        rows = Rows(q[:1])
        spans = case.decode_spans(ours, theirs)
        wanted = definition.attend(LAYER, theirs, spans, rows)
        assert relative(kernels.attend(LAYER, ours, spans, rows), wanted) < 1e-3


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
def test_error_is_at_most_twice_that_of_bf16_torch(backend: cpu.CpuBackend, group: int) -> None:
    """The error is that against FP32 attention on the same codes, dequantized. torch computes on them in BF16."""
    fmt = HackFormat(128, 64)
    case, kernels = Case(fmt, [300], heads=2), hack_kernels(backend, fmt)
    pool = case.pool(kernels)
    spans = case.decode_spans(pool)
    k, v = dequantized(case, kernels.export(pool, case.table[0, :4]))
    ours, low = 0.0, 0.0
    for seed in range(8):
        q = random_rows(9 + seed, 1, 2 * group, 128)
        out = kernels.attend(LAYER, pool, spans, Rows(q))
        exact = attention(q, k, v)
        ours += relative(out, exact)
        low += relative(attention(q.bfloat16(), k.bfloat16(), v.bfloat16()), exact)
    assert ours <= 2 * low


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_has_the_dtype_of_the_queries(backend: cpu.CpuBackend, dtype: torch.dtype) -> None:
    fmt = HackFormat(96, 32)
    case, kernels = Case(fmt, [100], heads=2), hack_kernels(backend, fmt)
    pool = case.pool(kernels)
    spans = case.decode_spans(pool)
    q = random_rows(9, 1, 6, 96).to(dtype)
    out = kernels.attend(LAYER, pool, spans, Rows(q))
    assert torch.equal(out, kernels.attend(LAYER, pool, spans, Rows(q.float())).to(dtype))


def dequantized(case: Case, wire: Planes) -> tuple[Tensor, Tensor]:
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
def test_result_is_independent_of_threads_and_splits(backend: cpu.CpuBackend, arithmetic: Arithmetic) -> None:
    """One long sequence is split among many threads, and every sequence of a batch also runs alone."""
    fmt = HackFormat(64, 32, arithmetic=arithmetic)
    case, kernels = Case(fmt, [2000, 40, 700], heads=2), hack_kernels(backend, fmt)
    pool = case.pool(kernels)
    spans = case.decode_spans(pool)
    q = random_rows(5, 3, 8, 64)
    backend.threads = 1
    alone = kernels.attend(LAYER, pool, spans, Rows(q))
    for threads in (2, 3, 7):
        backend.threads = threads
        assert relative(kernels.attend(LAYER, pool, spans, Rows(q)), alone) < 1e-6
    for b in range(3):
        only = slice(b, b + 1)
        one = Spans(spans.starts[only], spans.counts[only], torch.tensor([0]), case.table[only], spans.slots[only])
        out = kernels.attend(LAYER, pool, one, Rows(q[b : b + 1]))
        assert relative(out, alone[b : b + 1]) < 1e-6


def test_chunks_of_a_prompt_give_what_the_whole_gives(backend: cpu.CpuBackend) -> None:
    fmt = HackFormat(64, 32)
    case, kernels = Case(fmt, [333], heads=1), hack_kernels(backend, fmt)
    pages = case.pool(kernels)
    q = random_rows(6, 333, 5, 64)
    whole = case.prefill(kernels, pages, [q], [0])
    for begin in (1, 31, 32, 200, 332):
        assert relative(case.prefill(kernels, pages, [q], [begin]), whole[begin:]) < 1e-6


def test_bad_spans_are_named(backend: cpu.CpuBackend) -> None:
    fmt = HackFormat(64, 32)
    case, kernels = Case(fmt, [70], heads=1), hack_kernels(backend, fmt)
    pool = case.pool(kernels)
    spans = case.decode_spans(pool)
    q = random_rows(7, 1, 1, 64)
    broken = [
        Spans(spans.starts, spans.counts, spans.offsets, case.table + 99, spans.slots),
        Spans(spans.starts, spans.counts, spans.offsets, spans.table, spans.slots + 1),
        Spans(spans.starts + 4000, spans.counts, spans.offsets, spans.table, spans.slots),
        Spans(spans.starts, spans.counts, spans.offsets + 1, spans.table, spans.slots),
    ]
    for bad in broken:
        with pytest.raises(ValueError, match="sequence 0"):
            kernels.attend(LAYER, pool, bad, Rows(q))


def test_the_tensor_that_is_wrong_is_named(backend: cpu.CpuBackend) -> None:
    """The wrong tensor has another dtype, no dimensions, or gaps between elements that C++ would ignore."""
    fmt = HackFormat(64, 32)
    case, kernels = Case(fmt, [70, 40], heads=2), hack_kernels(backend, fmt)
    pool = case.pool(kernels)
    spans, row = case.decode_spans(pool), torch.zeros(2, 2, 64, dtype=torch.float16)
    rows = {"open_k": pool.open_k, "open_v": pool.open_v, "q": random_rows(7, 2, 4, 64), "k": row, "v": row}

    def attend(spans: Spans, open_k: Tensor, open_v: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.attend(LAYER, Pool(pool.planes, open_k, open_v), spans, Rows(q, k, v))

    where = {name: getattr(spans, name) for name in ("starts", "counts", "offsets", "table", "slots")}
    assert attend(spans, **rows).shape == (2, 4, 64)
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
                attend(given_spans, **given_rows)
    with pytest.raises(ValueError, match="k and v are given together"):
        kernels.attend(LAYER, pool, spans, Rows(rows["q"], k=row))
