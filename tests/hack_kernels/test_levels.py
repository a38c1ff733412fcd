"""Pages of levels: the definition agrees with the format's docstring and with FP64, and attention with the algebra."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hack_kernels.base import Pool, Rows, Spans
from hack_kernels.level_format import (
    FITS,
    HEAD_DIMS,
    LEVEL_BITS,
    PAGE_TOKENS,
    REFITS,
    STEP,
    STRETCH,
    TINY,
    Feedback,
    LevelFormat,
    LevelKernels,
    Scales,
    on_grid,
)
from hack_kernels.pools import new_pool
from hack_kernels.reference.levels import (
    LevelReference,
    dequantize,
    pack_codes,
    pack_scales,
    quantize_query,
    quantize_rows,
    top_level,
    unpack_codes,
    unpack_scales,
)
from hack_kernels.window import Window
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows

BITS = st.sampled_from(LEVEL_BITS)
SCALES = st.sampled_from(Scales)
HEADS = 2


def feedback_of(metric: Tensor) -> Feedback:
    """The feedback of metric = R^T R [heads, D, D]: the rows of R divided by their diagonal, and its squares."""
    root: Tensor = torch.linalg.cholesky(metric.double(), upper=True)
    diagonal = root.diagonal(dim1=-2, dim2=-1)
    return Feedback(on_grid((root / diagonal[..., None]).triu(1).float()), diagonal.square().float())


def metrics(seed: int, heads: int, dim: int) -> Tensor:
    """Positive definite matrices [heads, D, D] with a few strong directions, like second moments of queries."""
    factors: Tensor = random_rows(seed, heads, dim // 8, dim)
    return factors.mT @ factors / dim + 0.1 * torch.eye(dim)


def scalar_row(row: np.ndarray, bits: int, feedback: Feedback | None, scales: Scales) -> tuple[list[int], np.float16]:
    """Codes and scale of a row, computed as the format's docstring says, one number after another in float32."""
    f32 = np.float32
    z, half, tiny, x = f32(top_level(bits)), f32(0.5), f32(TINY), row.astype(f32)
    channels = list(range(len(x)))

    def level(t: np.float32) -> np.float32:
        return min(max(np.floor(t) + half, -z), z)

    def summed(terms: list[np.float32]) -> np.float32:
        total = terms[0]
        for term in terms[1:]:
            total = f32(total + term)
        return total

    def stored(s: np.float32) -> np.float32:
        half_scale = np.float16(min(max(s, tiny), f32(65504)))
        if scales is Scales.FP8:
            byte = round(int(half_scale.view(np.uint16)) / 128)
            half_scale = np.uint16(128 * min(max(byte, 1), 247)).view(np.float16)
        return f32(half_scale)

    s = max(f32(np.sqrt(f32(summed([f32(a * a) for a in x]) / f32(len(x)))) * f32(STEP[bits])), tiny)
    for _ in range(FITS):
        levels = [level(f32(a * f32(f32(1) / s))) for a in x]
        products = summed([f32(a * b) for a, b in zip(levels, x, strict=True)])
        s = max(f32(products / summed([f32(a * a) for a in levels])), tiny)
    if feedback is None:
        s = stored(s)
        return [int(level(f32(a * f32(f32(1) / s))) + z) for a in x], np.float16(s)

    gains, w, last_first = feedback.gains[0].numpy(), feedback.weights[0].numpy(), channels[::-1]
    b = [summed([*(f32(gains[d, i] * x[i]) for i in last_first if i > d), x[d]]) for d in channels]
    levels, a, s = list(x), list(x), stored(f32(s * f32(STRETCH[bits])))
    for refit in range(REFITS + 1):
        if refit:
            weighted = [f32(w[d] * a[d]) for d in channels]
            products = summed([f32(weighted[d] * b[d]) for d in last_first])
            s = stored(f32(products / summed([f32(weighted[d] * a[d]) for d in last_first])))
        for d in last_first:
            h = summed([f32(0), *(f32(gains[d, i] * levels[i]) for i in channels if i > d)])
            levels[d] = level(f32(f32(b[d] * f32(f32(1) / s)) - h))
            a[d] = f32(h + levels[d])
    return [int(each + z) for each in levels], np.float16(s)


@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_codes_and_scales_are_those_of_the_words_to_the_last_bit(bits: int, fed: bool, scales: Scales) -> None:
    rows = random_rows(bits, 1, 6, 64).half()
    rows[0, 1] *= 100
    rows[0, 2, 1:] = 0
    rows[0, 3] = 0
    rows[0, 4] *= 1e-6
    feedback = feedback_of(metrics(1, 1, 64)) if fed else None
    codes, scale = quantize_rows(rows, bits, feedback, scales)
    for row, found, found_scale in zip(rows[0], codes[0], scale[0], strict=True):
        wanted, wanted_scale = scalar_row(row.numpy(), bits, feedback, scales)
        assert found.tolist() == wanted
        assert found_scale.numpy() == wanted_scale


@settings(max_examples=60)
@given(
    bits=BITS, scales=SCALES, seed=st.integers(0, 9999), exponent=st.integers(-26, 15), dim=st.sampled_from([64, 96])
)
def test_codes_lie_in_range_and_scales_are_positive_and_finite(
    bits: int, scales: Scales, seed: int, exponent: int, dim: int
) -> None:
    rows = (random_rows(seed, 1, 5, dim) * 2.0**exponent).clamp(-65504, 65504).half()
    for feedback in (None, feedback_of(metrics(seed, 1, dim))):
        codes, scale = quantize_rows(rows, bits, feedback, scales)
        assert int(codes.max()) < 2**bits
        assert bool(scale.isfinite().all())
        assert float(scale.min()) >= TINY
        assert torch.equal(unpack_scales(pack_scales(scale, scales), scales), scale)


def test_the_largest_rows_have_a_finite_scale() -> None:
    """If all channels are nearly FP16's largest, the least-squares scale may exceed FP16."""
    rows = torch.full((1, 64), 58950.0).half()
    rows[0, :3] = 65504
    assert float(quantize_rows(rows, 2)[1]) == 65504
    for bits in LEVEL_BITS:
        codes, scale = quantize_rows(rows, bits)
        assert bool(dequantize(bits, codes, scale).isfinite().all())


@settings(max_examples=40)
@given(bits=BITS, scales=SCALES, seed=st.integers(0, 9999))
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int, scales: Scales, seed: int) -> None:
    rows, feedback = random_rows(seed, 1, 7, 64).half(), feedback_of(metrics(seed, 1, 64))
    codes, scale = quantize_rows(rows, bits, feedback, scales)
    for part in (slice(0, 1), slice(3, 5)):
        alone, alone_scale = quantize_rows(rows[:, part], bits, feedback, scales)
        assert torch.equal(alone, codes[:, part])
        assert torch.equal(alone_scale, scale[:, part])


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.36), (3, 0.20), (4, 0.11), (8, 0.011)])
@pytest.mark.parametrize("scales", Scales)
def test_the_error_of_normal_rows_is_near_the_least_of_uniform_levels(scales: Scales, bits: int, bound: float) -> None:
    """Errors are relative to the row. The least for a normal variable are 0.345, 0.193, 0.107, 0.010 (Max, 1960)."""
    rows = random_rows(1, 400, 128).half()
    found = dequantize(bits, *quantize_rows(rows, bits, scales=scales))
    assert float((found - rows).norm() / rows.norm()) < bound


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_feedback_lowers_the_error_in_its_metric_on_average(bits: int, seed: int) -> None:
    stretch = torch.linspace(-1.5, 1.5, 64).exp()[torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
    metric, rows = metrics(seed, 1, 64) * stretch * stretch[:, None], random_rows(seed + 50, 1, 300, 64).half()

    def error(feedback: Feedback | None) -> float:
        e = dequantize(bits, *quantize_rows(rows, bits, feedback)) - rows
        return float(((e @ metric) * e).sum(-1).mean())

    weighted = feedback_of(metric)
    unweighted = Feedback(weighted.gains, torch.ones_like(weighted.weights))
    gainless = Feedback(torch.zeros_like(weighted.gains), weighted.weights)
    assert error(weighted) < error(unweighted) < error(None)
    assert error(weighted) < error(gainless)


@settings(max_examples=60)
@given(bits=BITS, seed=st.integers(0, 9999), name=st.sampled_from("kv"), pi=st.sampled_from(PAGE_TOKENS))
def test_planes_pack_and_unpack(bits: int, seed: int, name: str, pi: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, pi, 64), dtype=torch.uint8, generator=generator)
    planes = pack_codes(name, bits, codes)
    fmt = LevelFormat(64, pi, bits, bits)
    shapes = {plane.name: plane.shape for plane in fmt.planes}
    assert {plane: tuple(x.shape[1:]) for plane, x in planes.items()}.items() <= shapes.items()
    assert sum(x.numel() for x in planes.values()) * 8 == codes.numel() * bits
    assert torch.equal(unpack_codes(name, bits, planes), codes)


def test_the_order_of_bits_is_pinned() -> None:
    """The earliest row has the lowest bits. Of 3 bits, the highest is in a separate plane."""
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    codes[:4, 5] = torch.tensor([7, 1, 4, 2])
    k, v = pack_codes("k", 3, codes), pack_codes("v", 3, codes)
    assert int(k["k_codes"][0, 5]) == int(v["v_codes"][5, 0]) == 0b10_00_01_11
    assert int(k["k_high"][0, 5]) == int(v["v_high"][5, 0]) == 0b0101


def filled(kernels: LevelKernels, fmt: LevelFormat, k: Tensor, v: Tensor) -> Pool:
    """The full pages of rows [n, Hkv, D] sealed in reverse order of pages, and exact rows in slot 0."""
    pi, full, heads = fmt.page_tokens, k.shape[0] // fmt.page_tokens, k.shape[1]
    pool = new_pool(fmt, kernels, CPU, max(full, 1), 1, range(heads))
    if full:
        sealed = (x[: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (k, v))
        kernels.seal(0, pool, torch.arange(full).flip(0), torch.arange(full) * pi, *sealed)
    fill_slot(pool, 0, k, v)
    return pool


def fill_slot(pool: Pool, slot: int, k: Tensor, v: Tensor) -> None:
    """Fill the slot as rows [n, Hkv, D] of a sequence leave it, with NaN where kernels may not read."""
    pi, n = pool.page_tokens, k.shape[0]
    exact = torch.tensor(
        [row for page in (*pool.window.earlier(n // pi), n // pi) for row in range(page * pi, min((page + 1) * pi, n))],
        dtype=torch.int64,
    )
    for slots, x in ((pool.open_k, k), (pool.open_v, v)):
        slots[slot] = torch.nan
        slots[slot][:, pool.window.at(exact, pi)] = x[exact].transpose(0, 1)


def add_row(pool: Pool, number: int, k: Tensor, v: Tensor) -> None:
    """Write row `number`, k and v [Hkv, D], of the sequence in slot 0, as decode does."""
    at = int(pool.window.at(torch.tensor(number), pool.page_tokens))
    pool.open_k[0, :, at], pool.open_v[0, :, at] = k, v


def one_span(start: int, count: int, pages: int) -> Spans:
    table = torch.arange(max(pages, 1)).flip(0)[None]
    return Spans(torch.tensor([start]), torch.tensor([count]), torch.tensor([0]), table, torch.tensor([0]))


def exact(
    fmt: LevelFormat, q: Tensor, k: Tensor, v: Tensor, at: int, feedback: Feedback | None
) -> tuple[Tensor, float]:
    """FP64 attention of the query q [D] of row `at`, for one KV head, over dequantized pages and exact ones in FP16.
    Also the largest change by weights that are so near a tie that FP32 rounds them to the other side."""
    pi, coded = fmt.page_tokens, fmt.window.coded(at // fmt.page_tokens)
    sealed, scaled = slice(coded.start * pi, coded.stop * pi), q * q.shape[0] ** -0.5
    codes, scale = quantize_query(scaled)
    k_hat = dequantize(fmt.k_bits, *quantize_rows(k[None], fmt.k_bits, feedback, fmt.scales), torch.float64)[0]
    v_codes, v_scale = quantize_rows(v, fmt.v_bits, scales=fmt.scales)
    levels = v_codes.double() - top_level(fmt.v_bits)
    scores = k[: at + 1].double() @ scaled.double()
    scores[sealed] = k_hat[sealed] @ (codes.double() * scale.double())
    p = torch.exp(scores - scores.max())
    exact = torch.ones(at + 1, dtype=torch.bool)
    exact[sealed] = False
    total, slack = p[exact] @ v[: at + 1][exact].double(), 0.0
    for page in coded:
        rows = slice(page * pi, (page + 1) * pi)
        w = p[rows] * v_scale[rows].double()
        steps = w * 127 / w.max()
        near = ((steps - steps.floor() - 0.5).abs() < 2e-3).double()
        total = total + w.max() / 127 * (steps.round() @ levels[rows])
        slack += float(w.max() / 127 * (near @ levels[rows].norm(dim=-1)))
    return total / p.sum(), slack / float(p.sum())


FORMATS = [
    *(LevelFormat(d, pi, k, v) for d, pi, (k, v) in itertools.product(HEAD_DIMS, PAGE_TOKENS, [(4, 4), (3, 2)])),
    LevelFormat(64, 32, 2, 3),
    LevelFormat(64, 32, 8, 8),
    *(LevelFormat(64, 32, 3, 2, Window(*w)) for w in [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]),
    LevelFormat(128, 64, 2, 4, Window(1, 2)),
    *(LevelFormat(64, 32, k, v, Window(1, 1), Scales.FP8) for k, v in [(2, 2), (3, 2), (4, 4)]),
]


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_attention_on_codes_is_attention_on_what_they_stand_for(fmt: LevelFormat) -> None:
    pages = fmt.window.pages + 2
    n, d = pages * fmt.page_tokens + 3, fmt.head_dim
    k, v = (random_rows(seed, n, HEADS, d).half() for seed in (1, 2))
    q = random_rows(3, n, HEADS * 3, d)
    for feedback in (None, feedback_of(metrics(4, HEADS, d))):
        kernels = LevelReference(fmt, CPU)
        if feedback is not None:
            kernels.set_feedback(0, feedback)
        out = kernels.attend(0, filled(kernels, fmt, k, v), one_span(0, n, pages), Rows(q, k, v))
        for at, head in ((0, 0), (fmt.page_tokens - 1, 1), (fmt.page_tokens, 4), (n - 1, 5)):
            kv = head // 3
            wanted, slack = exact(fmt, q[at, head], k[:, kv], v[:, kv], at, feedback and feedback.heads(kv, 1))
            error = float((out[at, head].double() - wanted).norm())
            assert error <= 2e-6 * float(wanted.norm()) + slack, (at, head, error, slack)


@pytest.mark.parametrize("window", [Window(), Window(1, 1), Window(0, 2)], ids=str)
def test_decode_equals_prefill_row_by_row(window: Window) -> None:
    fmt, total = LevelFormat(64, 32, 3, 2, window), 134
    kernels = LevelReference(fmt, CPU)
    k, v = (random_rows(seed, total, HEADS, 64).half() for seed in (7, 8))
    q = random_rows(9, total, HEADS * 2, 64)
    for n in (1, 31, 32, 33, 64, 65, 70, 128, 129, 134):
        pool, last = filled(kernels, fmt, k[: n - 1], v[: n - 1]), slice(n - 1, n)
        spans = one_span(n - 1, 1, (n - 1) // 32)
        prefill = kernels.attend(0, pool, spans, Rows(q[last], k[last], v[last]))
        add_row(pool, n - 1, k[n - 1], v[n - 1])
        assert torch.allclose(prefill, kernels.attend(0, pool, spans, Rows(q[last])), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_export_and_install_are_bit_exact(bits: int, scales: Scales) -> None:
    fmt = LevelFormat(96, 64, bits, bits, scales=scales)
    kernels = LevelReference(fmt, CPU)
    k, v = (random_rows(seed, 192, HEADS, 96).half() for seed in (10, 11))
    wire = kernels.export(filled(kernels, fmt, k, v), torch.tensor([2, 0, 1]))
    assert {name: (tuple(x.shape[2:]), x.dtype) for name, x in wire.items()} == {
        p.name: (p.shape, p.dtype) for p in fmt.planes
    }
    other = new_pool(fmt, kernels, CPU, 5, 1, range(HEADS))
    kernels.install(other, torch.tensor([4, 1, 3]), wire)
    back = kernels.export(other, torch.tensor([4, 1, 3]))
    assert all(torch.equal(back[name], plane) for name, plane in wire.items())


def test_feedback_goes_by_the_layer_and_the_heads_of_the_model() -> None:
    """A pool of heads 2 and 3 has the same bytes as a pool of all four. Other layers have no feedback."""
    fmt, kernels = LevelFormat(64, 32, 2, 2), LevelReference(LevelFormat(64, 32, 2, 2), CPU)
    kernels.set_feedback(1, feedback_of(metrics(5, 4, 64)))
    k, v = (random_rows(seed, 1, 4, 32, 64).half() for seed in (1, 2))
    zero, made = torch.tensor([0]), list[dict[str, Tensor]]()
    for layer, first in ((1, 0), (1, 2), (0, 0)):
        pool = new_pool(fmt, kernels, CPU, 1, 1, range(first, 4))
        kernels.seal(layer, pool, zero, zero, k[:, first:], v[:, first:])
        made.append(kernels.export(pool, zero))
    whole, cut, plain = made
    assert all(torch.equal(cut[name], plane[2:]) for name, plane in whole.items())
    assert not torch.equal(whole["k_codes"], plain["k_codes"])
    assert all(torch.equal(whole[name], plain[name]) for name in ("v_codes", "v_scale"))
