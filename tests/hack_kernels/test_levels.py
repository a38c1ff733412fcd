"""Pages of levels: the definition against the words of the format, against FP64, and attention against the algebra."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hack_kernels.base import Pool, Rows, Spans, new_pool
from hack_kernels.level_format import FITS, HEAD_DIMS, LEVEL_BITS, PAGE_TOKENS, STEP, TINY, LevelFormat, LevelKernels
from hack_kernels.reference.levels import (
    LevelReference,
    dequantize,
    pack_codes,
    quantize_query,
    quantize_rows,
    top_level,
    unpack_codes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows

BITS = st.sampled_from(LEVEL_BITS)
HEADS = 2


def gains_of(metric: Tensor) -> Tensor:
    """R of metric = R^T R [..., D, D], its rows divided by the diagonal, strictly upper."""
    root: Tensor = torch.linalg.cholesky(metric.double(), upper=True)
    return (root / root.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1).float()


def metrics(seed: int, heads: int, dim: int) -> Tensor:
    """Positive definite [heads, D, D], with a few strong directions, as second moments of queries have."""
    factors: Tensor = random_rows(seed, heads, dim // 8, dim)
    return factors.mT @ factors / dim + 0.1 * torch.eye(dim)


def scalar_row(row: np.ndarray, bits: int, gains: np.ndarray | None) -> tuple[list[int], np.float16]:
    """The docstring of the format, one number after another in float32."""
    f32 = np.float32
    z, half, tiny, one = f32(top_level(bits)), f32(0.5), f32(TINY), row.astype(f32)

    def level(t: np.float32) -> np.float32:
        return min(max(np.floor(t) + half, -z), z)

    def summed(terms: list[np.float32]) -> np.float32:
        total = terms[0]
        for term in terms[1:]:
            total = f32(total + term)
        return total

    scale = max(f32(np.sqrt(f32(summed([f32(x * x) for x in one]) / f32(len(one)))) * f32(STEP[bits])), tiny)
    for _ in range(FITS):
        levels = [level(f32(x * f32(f32(1) / scale))) for x in one]
        products = summed([f32(a * x) for a, x in zip(levels, one, strict=True)])
        scale = max(f32(products / summed([f32(a * a) for a in levels])), tiny)
    rounded = np.float16(scale)
    y = [f32(x * f32(f32(1) / f32(rounded))) for x in one]
    t, codes = list(y), [0] * len(y)
    for d in reversed(range(len(y))):
        found = level(t[d])
        codes[d] = int(found + z)
        for i in range(d) if gains is not None else ():
            assert gains is not None
            t[i] = f32(t[i] + f32(f32(y[d] - found) * gains[i, d]))
    return codes, rounded


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_codes_and_scales_are_those_of_the_words_to_the_last_bit(bits: int, fed: bool) -> None:
    rows = random_rows(bits, 6, 64).half()
    rows[1] *= 100
    rows[2, 1:] = 0
    rows[3] = 0
    rows[4] *= 1e-6
    gains = gains_of(metrics(1, 1, 64))[0] if fed else None
    codes, scale = quantize_rows(rows, bits, gains)
    for row, found, found_scale in zip(rows, codes, scale, strict=True):
        wanted, wanted_scale = scalar_row(row.numpy(), bits, None if gains is None else gains.numpy())
        assert found.tolist() == wanted
        assert found_scale.numpy() == wanted_scale


@settings(max_examples=60, deadline=None)
@given(bits=BITS, seed=st.integers(0, 9999), exponent=st.integers(-26, 15), dim=st.sampled_from([64, 96]))
def test_codes_lie_in_range_and_scales_are_positive_and_finite(bits: int, seed: int, exponent: int, dim: int) -> None:
    rows = (random_rows(seed, 5, dim) * 2.0**exponent).clamp(-65504, 65504).half()
    for gains in (None, gains_of(metrics(seed, 1, dim))[0]):
        codes, scale = quantize_rows(rows, bits, gains)
        assert int(codes.max()) < 2**bits
        assert bool(scale.isfinite().all())
        assert float(scale.min()) >= TINY


def test_the_largest_rows_have_a_finite_scale() -> None:
    """Least squares may want a scale beyond FP16 where all channels are nearly as large as FP16 goes."""
    rows = torch.full((1, 64), 58950.0).half()
    rows[0, :3] = 65504
    assert float(quantize_rows(rows, 2)[1]) == 65504
    for bits in LEVEL_BITS:
        codes, scale = quantize_rows(rows, bits)
        assert bool(dequantize(bits, codes, scale).isfinite().all())


@settings(max_examples=40, deadline=None)
@given(bits=BITS, seed=st.integers(0, 9999))
def test_a_row_does_not_depend_on_the_rows_beside_it(bits: int, seed: int) -> None:
    rows, gains = random_rows(seed, 7, 64).half(), gains_of(metrics(seed, 1, 64))[0]
    codes, scale = quantize_rows(rows, bits, gains)
    for part in (slice(0, 1), slice(3, 5)):
        alone, alone_scale = quantize_rows(rows[part], bits, gains)
        assert torch.equal(alone, codes[part])
        assert torch.equal(alone_scale, scale[part])


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.36), (3, 0.20), (4, 0.11), (8, 0.011)])
def test_the_error_of_normal_rows_is_near_the_least_of_uniform_levels(bits: int, bound: float) -> None:
    """Relative to the row: 0.345, 0.193, 0.107 and 0.010 are the least for a normal variable (Max, 1960)."""
    rows = random_rows(1, 400, 128).half()
    found = dequantize(bits, *quantize_rows(rows, bits))
    assert float((found - rows).norm() / rows.norm()) < bound


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_feedback_lowers_the_error_in_its_metric_on_average(bits: int, seed: int) -> None:
    metric, rows = metrics(seed, 1, 64)[0], random_rows(seed + 50, 300, 64).half()

    def error(gains: Tensor | None) -> float:
        e = dequantize(bits, *quantize_rows(rows, bits, gains)) - rows
        return float(((e @ metric) * e).sum(-1).mean())

    assert error(gains_of(metric)) < error(None)
    assert error(torch.zeros(64, 64)) == error(None)


@settings(max_examples=60, deadline=None)
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
    """Earliest row lowest; of 3 bits the highest stands in a plane of its own."""
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    codes[:4, 5] = torch.tensor([7, 1, 4, 2])
    k, v = pack_codes("k", 3, codes), pack_codes("v", 3, codes)
    assert int(k["k_codes"][0, 5]) == int(v["v_codes"][5, 0]) == 0b10_00_01_11
    assert int(k["k_high"][0, 5]) == int(v["v_high"][5, 0]) == 0b0101


def filled(kernels: LevelKernels, fmt: LevelFormat, k: Tensor, v: Tensor) -> Pool:
    """The full pages of rows [n, Hkv, D] sealed in reverse order of pages, the rest in slot 0's open page."""
    pi, full, heads = fmt.page_tokens, k.shape[0] // fmt.page_tokens, k.shape[1]
    pool = new_pool(fmt, kernels, CPU, max(full, 1), 1, range(heads))
    if full:
        sealed = (x[: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (k, v))
        kernels.seal(0, pool, torch.arange(full).flip(0), torch.arange(full) * pi, *sealed)
    for open_rows, x in ((pool.open_k, k), (pool.open_v, v)):
        open_rows[0, :, : k.shape[0] % pi] = x[full * pi :].transpose(0, 1)
    return pool


def one_span(start: int, count: int, pages: int) -> Spans:
    table = torch.arange(max(pages, 1)).flip(0)[None]
    return Spans(torch.tensor([start]), torch.tensor([count]), torch.tensor([0]), table, torch.tensor([0]))


def exact(fmt: LevelFormat, q: Tensor, k: Tensor, v: Tensor, at: int, gains: Tensor | None) -> tuple[Tensor, float]:
    """FP64 attention of the query q [D] of row `at` over dequantized pages and its own in FP16, for one KV head; and
    how far weights may move it that lie so near a tie that FP32 rounds them to the other side."""
    pi = fmt.page_tokens
    sealed, scaled = at // pi * pi, q * q.shape[0] ** -0.5
    codes, scale = quantize_query(scaled)
    k_hat = dequantize(fmt.k_bits, *quantize_rows(k[:sealed], fmt.k_bits, gains), torch.float64)
    v_codes, v_scale = quantize_rows(v[:sealed], fmt.v_bits)
    levels = v_codes.double() - top_level(fmt.v_bits)
    scores = torch.cat(
        (k_hat @ (codes.double() * scale.double()), k[sealed : at + 1].double() @ scaled.double()),
    )
    p = torch.exp(scores - scores.max())
    total, slack = p[sealed:] @ v[sealed : at + 1].double(), 0.0
    for page in range(at // pi):
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
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_attention_on_codes_is_attention_on_what_they_stand_for(fmt: LevelFormat) -> None:
    n, d = 2 * fmt.page_tokens + 3, fmt.head_dim
    k, v = (random_rows(seed, n, HEADS, d).half() for seed in (1, 2))
    q, gains = random_rows(3, n, HEADS * 3, d), gains_of(metrics(4, HEADS, d))
    for given_gains in (None, gains):
        kernels = LevelReference(fmt, CPU)
        if given_gains is not None:
            kernels.set_feedback(0, given_gains)
        out = kernels.attend(0, filled(kernels, fmt, k, v), one_span(0, n, 2), Rows(q, k, v))
        for at, head in ((0, 0), (fmt.page_tokens - 1, 1), (fmt.page_tokens, 4), (n - 1, 5)):
            kv = head // 3
            own_gains = None if given_gains is None else given_gains[kv]
            wanted, slack = exact(fmt, q[at, head], k[:, kv], v[:, kv], at, own_gains)
            error = float((out[at, head].double() - wanted).norm())
            assert error <= 2e-6 * float(wanted.norm()) + slack, (at, head, error, slack)


def test_decode_equals_prefill_row_by_row() -> None:
    fmt, total = LevelFormat(64, 32, 3, 2), 70
    kernels = LevelReference(fmt, CPU)
    k, v = (random_rows(seed, total, HEADS, 64).half() for seed in (7, 8))
    q = random_rows(9, total, HEADS * 2, 64)
    for n in (1, 31, 32, 33, 64, 65, 70):
        pool, last = filled(kernels, fmt, k[: n - 1], v[: n - 1]), slice(n - 1, n)
        spans = one_span(n - 1, 1, (n - 1) // 32)
        prefill = kernels.attend(0, pool, spans, Rows(q[last], k[last], v[last]))
        pool.open_k[0, :, (n - 1) % 32], pool.open_v[0, :, (n - 1) % 32] = k[n - 1], v[n - 1]
        assert torch.allclose(prefill, kernels.attend(0, pool, spans, Rows(q[last])), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_export_and_install_are_bit_exact(bits: int) -> None:
    fmt = LevelFormat(96, 64, bits, bits)
    kernels = LevelReference(fmt, CPU)
    k, v = (random_rows(seed, 192, HEADS, 96).half() for seed in (10, 11))
    wire = kernels.export(filled(kernels, fmt, k, v), torch.tensor([2, 0, 1]))
    assert {name: tuple(x.shape[2:]) for name, x in wire.items()} == {p.name: p.shape for p in fmt.planes}
    other = new_pool(fmt, kernels, CPU, 5, 1, range(HEADS))
    kernels.install(other, torch.tensor([4, 1, 3]), wire)
    back = kernels.export(other, torch.tensor([4, 1, 3]))
    assert all(torch.equal(back[name], plane) for name, plane in wire.items())


def test_feedback_goes_by_the_layer_and_the_heads_of_the_model() -> None:
    """A pool of heads 2 and 3 gives the bytes that a pool of all four has there; other layers have no feedback."""
    fmt, kernels = LevelFormat(64, 32, 2, 2), LevelReference(LevelFormat(64, 32, 2, 2), CPU)
    kernels.set_feedback(1, gains_of(metrics(5, 4, 64)))
    k, v = (random_rows(seed, 1, 4, 32, 64).half() for seed in (1, 2))
    zero, made = torch.tensor([0]), list[dict[str, Tensor]]()
    for layer, first in ((1, 0), (1, 2), (0, 0)):
        pool = new_pool(fmt, kernels, CPU, 1, 1, range(first, 4))
        kernels.seal(layer, pool, zero, zero, k[:, first:], v[:, first:])
        made.append(kernels.export(pool, zero))
    whole, cut, plain = made
    assert all(torch.equal(cut[name], plane[2:]) for name, plane in whole.items())
    assert not torch.equal(whole["k_codes"], plain["k_codes"])
    assert all(torch.equal(whole[name], plain[name]) for name in ("k_scale", "v_codes", "v_scale"))


def test_wrong_settings_and_gains_are_named() -> None:
    for wrong, said in (
        ({"head_dim": 80}, "head_dim is 80"),
        ({"page_tokens": 48}, "page_tokens is 48"),
        ({"k_bits": 5}, "k_bits is 5"),
        ({"v_bits": 1}, "v_bits is 1"),
    ):
        with pytest.raises(ValueError, match=said):
            LevelFormat(**{"head_dim": 64, **wrong})
    kernels = LevelReference(LevelFormat(64, 32), CPU)
    for gains in (torch.zeros(2, 64, 32), torch.zeros(64, 64), torch.zeros(2, 64, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="gains is"):
            kernels.set_feedback(0, gains)
