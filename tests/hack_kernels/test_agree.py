"""Every backend against the algebra: attention on codes equals FP64 attention on the dequantized operands."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hack_kernels import BACKENDS, cpu, load
from hack_kernels.base import Backend, BackendUnavailable, Pool, Rows, Spans
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.hack_format import (
    CODE_BITS,
    HEAD_DIMS,
    PAGE_TOKENS,
    Arithmetic,
    HackFormat,
    HackKernels,
    OpenPage,
    Rounding,
)
from hack_kernels.philox import Coordinates
from hack_kernels.quantize import quantize_k, quantize_v
from hack_kernels.reference.eq4 import CodeArithmetic, quantize_query
from torch import Tensor
from torch.nn.functional import pad

from tests.hack_kernels.pools import empty_pool, hack_kernels, random_rows, reference

GROUPS = [1, 3, 7]


def backends_and_paths() -> list[tuple[str, str]]:
    """Every backend; `cpu` once for each instruction set that this CPU supports."""
    try:
        isas = supported_isas()
    except BackendUnavailable:
        isas = [""]
    return [(name, isa) for name in sorted(BACKENDS) for isa in (isas if name == "cpu" else [""])]


@pytest.fixture(params=backends_and_paths(), ids=" ".join)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    name, isa = request.param
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    try:
        return load(name)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def one_span(start: int, count: int, pages: int) -> Spans:
    table = torch.arange(max(pages, 1))[None]
    return Spans(torch.tensor([start]), torch.tensor([count]), torch.tensor([0]), table, torch.tensor([0]))


def dequantized(fmt: HackFormat, layer: int, k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """FP64 K^ and V^ [Π, Hkv, D] of one page."""
    where = Coordinates(layer, 0, page * fmt.page_tokens + torch.arange(k.shape[0]))
    k_hat = quantize_k(fmt, where, k).dequantize(torch.float64).flatten(2)
    return k_hat, quantize_v(fmt, where, v).dequantize(torch.float64).permute(2, 0, 1)


def quantized_query(fmt: HackFormat, q: Tensor) -> Tensor:
    """FP64 Q^ [D] of one scaled row."""
    query = quantize_query(fmt, q[None, None])
    minimum = 0.0 if query.minimum is None else query.minimum.double()[..., None]
    return (query.codes.double() * query.scale.double()[..., None] + minimum).flatten()


def quantized_weights(fmt: HackFormat, p: Tensor) -> tuple[Tensor, Tensor]:
    """FP64 P^ of one page's weights (the largest is 1). Also the quantization step of each weight that is so near a tie
    that FP32 may round it to the other side, and 0 for other weights."""
    if fmt.arithmetic is Arithmetic.SYMMETRIC:
        low, scale = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1 / 127, dtype=torch.float64)
    else:
        low = p.min()
        scale = (1 - low) / 255 if float(1 - low) else torch.tensor(1.0, dtype=torch.float64)
    steps = (p - low) / scale + 0.5
    near_tie = (steps - steps.round()).abs() < 2e-3
    return torch.floor(steps) * scale + low, near_tie * scale


def definition(fmt: HackFormat, layer: int, q: Tensor, k: Tensor, v: Tensor, position: int) -> tuple[Tensor, float]:
    """Attention of one query [D] at `position` in FP64: K^, V^ before its page, its own page by the open-page rule.

    Also returns the largest change of the result that weights near a rounding tie can cause. With requantization, K and
    V end at `position` or with its page: V's codes there are those of all rows of the page.
    """
    pi = fmt.page_tokens
    own, scaled = position // pi, q * q.shape[0] ** -0.5
    q_hat = quantized_query(fmt, scaled)
    requantized = fmt.open_page is OpenPage.REQUANTIZE
    scores, values = [], []
    for page in range(own + 1):
        rows = slice(page * pi, min((page + 1) * pi, position + 1))
        k_hat, v_hat = (x[:, 0] for x in dequantized(fmt, layer, k[rows], v[rows], page))
        if page < own or requantized:
            missing = pi - v_hat.shape[0]
            scores.append(pad(k_hat @ q_hat, (0, missing), value=-math.inf))
            values.append(pad(v_hat, (0, 0, 0, missing)))
        else:
            exact = fmt.open_page is OpenPage.EXACT
            scores.append(k[rows, 0].double() @ scaled.double() if exact else k_hat @ q_hat)
            values.append(v[rows, 0].double())
    overall = max(float(s.max()) for s in scores)
    numerator, denominator, slack = torch.zeros(q.shape[0], dtype=torch.float64), 0.0, 0.0
    for page, (score, value) in enumerate(zip(scores, values, strict=True)):
        page_max = score.max()
        beta, p = torch.exp(page_max - overall), torch.exp(score - page_max)
        if page < own or requantized:
            p, ties = quantized_weights(fmt, p)
            slack += 2 * float(beta * (ties @ value.norm(dim=-1)))
        numerator, denominator = numerator + beta * p @ value, denominator + float(beta * p.sum())
    return numerator / denominator, slack / denominator


def fill(kernels: HackKernels, fmt: HackFormat, layer: int, k: Tensor, v: Tensor) -> Pool:
    """Seal the full pages of rows [n, Hkv, D] in a new pool. The rest goes to slot 0's open page."""
    pi, n, heads = fmt.page_tokens, k.shape[0], k.shape[1]
    full = n // pi
    pool = empty_pool(kernels, fmt, max(full, 1), heads)
    if full:
        sealed = (x[: full * pi].view(full, pi, heads, fmt.head_dim).transpose(1, 2) for x in (k, v))
        kernels.seal(layer, pool, torch.arange(full), torch.arange(full) * pi, *sealed)
    for open_rows, x in ((pool.open_k, k), (pool.open_v, v)):
        open_rows[0, :, : n % pi] = x[full * pi :].transpose(0, 1)
    return pool


FORMATS = [
    HackFormat(d, pi, kb, vb, arithmetic=a, open_page=o)
    for d, pi, (kb, vb), a, o in itertools.product(
        HEAD_DIMS, PAGE_TOKENS, [(2, 2), (4, 2)], Arithmetic, [OpenPage.EXACT, OpenPage.K_CODES]
    )
] + [
    HackFormat(64, 32, 8, 8, arithmetic=a, open_page=o)
    for a, o in itertools.product(Arithmetic, [OpenPage.EXACT, OpenPage.K_CODES])
]
CASES = [(one, fmt) for one in backends_and_paths() for fmt in (FORMATS[::7] if one[0] == "triton" else FORMATS)]
"""Every format on every backend, but only every seventh on Triton, which interprets."""


@pytest.mark.parametrize(("backend", "fmt"), CASES, indirect=["backend"], ids=str)
def test_homomorphic_attention_equals_the_definition(backend: Backend, fmt: HackFormat) -> None:
    """Each format agrees at positions around page boundaries, to 1e-6 relative plus the effect of ties."""
    n = 2 * fmt.page_tokens + 3
    k, v = (random_rows(seed, n, 1, fmt.head_dim).to(torch.float16) for seed in (1, 2))
    q = random_rows(3, n, 1, fmt.head_dim)
    kernels = hack_kernels(backend, fmt)
    out = kernels.attend(0, fill(kernels, fmt, 0, k, v), one_span(0, n, 2), Rows(q, k, v))
    for position in (0, fmt.page_tokens - 1, fmt.page_tokens, n - 1):
        expected, slack = definition(fmt, 0, q[position, 0], k, v, position)
        error = float((out[position, 0].double() - expected).norm())
        assert error <= 1e-6 * float(expected.norm()) + slack, (position, error, slack)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("more", [0, 3, 31])
def test_attention_over_a_requantized_page_equals_the_definition(
    backend: Backend, arithmetic: Arithmetic, more: int
) -> None:
    fmt = HackFormat(96, 32, 4, 2, Rounding.STOCHASTIC, arithmetic, open_page=OpenPage.REQUANTIZE)
    n = fmt.page_tokens + more
    k, v = (random_rows(seed, n, 1, 96).to(torch.float16) for seed in (1, 2))
    q = random_rows(3, n, 1, 96)
    kernels = hack_kernels(backend, fmt)
    pool, spans = empty_pool(kernels, fmt, 2, 1), one_span(0, n, 2)
    kernels.requantize(0, pool, spans, k, v)
    out = kernels.attend(0, pool, spans, Rows(q, k, v))
    for position in {fmt.page_tokens - 1, n - 1}:
        expected, slack = definition(fmt, 0, q[position, 0], k, v, position)
        error = float((out[position, 0].double() - expected).norm())
        assert error <= 1e-6 * float(expected.norm()) + slack, (position, error, slack)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_scores_equal_fp64_products_of_the_dequantized_operands(
    arithmetic: Arithmetic, head_dim: int, page_tokens: int
) -> None:
    """Eq. (4) itself, before any further rounding: relative 1e-6."""
    fmt = HackFormat(head_dim, page_tokens, arithmetic=arithmetic)
    k, v = (random_rows(seed, 3 * page_tokens, 2, head_dim).to(torch.float16) for seed in (4, 5))
    arithmetic_of = CodeArithmetic(fmt)
    codes, _ = arithmetic_of.unpack(fill(reference(fmt), fmt, 1, k, v).planes)
    q = random_rows(6, 2, 14, head_dim)
    query = quantize_query(fmt, q)
    scores = arithmetic_of.scores(query, codes)
    minimum = 0.0 if query.minimum is None else query.minimum.double()[..., None]
    q_hat = (query.codes.double() * query.scale.double()[..., None] + minimum).transpose(1, 2).flatten(2)
    k_hat = torch.cat([dequantized(fmt, 1, k[p * page_tokens : (p + 1) * page_tokens], v, p)[0] for p in range(3)])
    expected = q_hat @ k_hat.permute(1, 2, 0)
    assert float((scores.double() - expected).norm() / expected.norm()) <= 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("open_page", list(OpenPage))
def test_decode_equals_prefill_row_by_row(backend: Backend, group: int, open_page: OpenPage) -> None:
    fmt = HackFormat(64, 32, open_page=open_page)
    kernels, heads, total = hack_kernels(backend, fmt), 2, 70
    k, v = (random_rows(seed, total, heads, 64).to(torch.float16) for seed in (7, 8))
    q = random_rows(9, total, heads * group, 64)
    for n in (1, 31, 32, 33, 64, 65, 70):
        if open_page is OpenPage.REQUANTIZE:
            pool = requantized(kernels, fmt, k[:n], v[:n])
        else:
            pool = fill(kernels, fmt, 0, k[: n - 1], v[: n - 1])
        spans, last = one_span(n - 1, 1, -(-n // 32)), slice(n - 1, n)
        prefill = kernels.attend(0, pool, spans, Rows(q[last], k[last], v[last]))
        pool.open_k[0, :, (n - 1) % 32], pool.open_v[0, :, (n - 1) % 32] = k[n - 1], v[n - 1]
        decode = kernels.attend(0, pool, spans, Rows(q[last]))
        assert torch.allclose(prefill, decode, rtol=1e-5, atol=1e-6)


def requantized(kernels: HackKernels, fmt: HackFormat, k: Tensor, v: Tensor) -> Pool:
    """A pool with all rows as codes, appended one by one."""
    pool = empty_pool(kernels, fmt, 4, k.shape[1])
    for i in range(k.shape[0]):
        kernels.requantize(0, pool, one_span(i, 1, 4), k[i : i + 1], v[i : i + 1])
    return pool


@pytest.mark.grid
@pytest.mark.parametrize("bits", list(itertools.product(CODE_BITS, CODE_BITS)))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_export_and_install_are_bit_exact_and_recount_sums(
    backend: Backend, bits: tuple[int, int], rounding: Rounding
) -> None:
    fmt = HackFormat(96, 64, *bits, rounding=rounding, arithmetic=Arithmetic.ASYMMETRIC)
    k, v = (random_rows(seed, 192, 2, 96).to(torch.float16) for seed in (10, 11))
    kernels = hack_kernels(backend, fmt)
    wire = kernels.export(fill(kernels, fmt, 2, k, v), torch.tensor([2, 0, 1]))
    sent = {name: plane for name, plane in wire.items() if not name.endswith("sums")}
    other = empty_pool(kernels, fmt, 5, 2)
    kernels.install(other, torch.tensor([4, 1, 3]), sent)
    back = kernels.export(other, torch.tensor([4, 1, 3]))
    assert all(torch.equal(back[name], plane) for name, plane in wire.items())


def test_summation_elimination_changes_nothing(backend: Backend) -> None:
    k, v = (random_rows(seed, 130, 2, 128).to(torch.float16) for seed in (12, 13))
    q = random_rows(14, 130, 4, 128)
    outs = []
    for stored in (True, False):
        fmt = HackFormat(128, 64, arithmetic=Arithmetic.ASYMMETRIC, stored_sums=stored)
        kernels = hack_kernels(backend, fmt)
        pool = fill(kernels, fmt, 0, k, v)
        assert ("k_sums" in pool.planes) == stored
        outs.append(kernels.attend(0, pool, one_span(0, 130, 2), Rows(q, k, v)))
    assert torch.equal(outs[0], outs[1])


def test_error_is_small_with_four_bits_and_vanishes_for_constant_pages(backend: Backend) -> None:
    fmt = HackFormat(64, 32)
    k, v = (torch.full((64, 1, 64), x, dtype=torch.float16) for x in (0.25, -3.0))
    kernels = hack_kernels(backend, fmt)
    q = random_rows(15, 64, 1, 64)
    out = kernels.attend(0, fill(kernels, fmt, 0, k, v), one_span(0, 64, 2), Rows(q, k, v))
    assert torch.allclose(out, torch.full_like(out, -3.0), atol=1e-6)


def test_wrong_inputs_are_named(backend: Backend) -> None:
    fmt = HackFormat(64, 32)
    kernels = hack_kernels(backend, fmt)
    pool = empty_pool(kernels, fmt, 2, 1)
    row = torch.zeros(1, 1, 32, 64)
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match=r"k is \(1, 1, 32, 64\) torch.float32"):
        kernels.seal(0, pool, ids, ids, row, row.half())
    with pytest.raises(ValueError, match="page ids"):
        kernels.seal(0, pool, torch.tensor([2]), ids, row.half(), row.half())
    with pytest.raises(ValueError, match="plane k_codes is missing"):
        kernels.install(pool, ids, {})
    with pytest.raises(ValueError, match="head_dim is 80"):
        HackFormat(80)


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"'cuda9' is unknown; known: .*reference"):
        load("cuda9")
