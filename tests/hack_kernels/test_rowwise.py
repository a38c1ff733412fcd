"""Operations on single rows in C++, under every instruction path, against their torch form."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable, Spans
from hack_kernels.rowwise import Rowwise
from torch import Tensor

try:
    ISAS = cpu.supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

TORCH = Rowwise()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 15, 16, 172, 768]
"""Columns: within a vector, whole vectors, and vectors with a rest."""


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> cpu.CpuKernels:
    return cpu.CpuKernels(request.param, threads=2)


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Within one rounding to the dtype of what FP64 gives, and a few of FP32."""
    step = torch.finfo(found.dtype).eps
    assert bool(((found.double() - exact).abs() <= (step / 2 + 2e-6) * exact.abs() + 1e-7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_norm(kernels: cpu.CpuKernels, n: int, dtype: torch.dtype) -> None:
    x, more, weight = rows(1, 7, n, dtype=dtype), rows(2, 7, n, dtype=dtype), rows(3, n, dtype=dtype)
    summed = x + more
    for terms in (None, more):
        wide = (x if terms is None else summed).double()
        exact = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for each in (kernels, TORCH):
            given = x.clone()
            assert_close(each.norm(given, weight, 1e-5, terms), exact)
            assert torch.equal(given, x if terms is None else summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 16, 96, 128])
def test_rotate_is_bit_equal(kernels: cpu.CpuKernels, head_dim: int, dtype: torch.dtype) -> None:
    wide, turns = rows(4, 9, 7, head_dim, dtype=dtype), rows(5, 9, head_dim)
    for heads in (1, 3, 5):
        for x in (wide[:, :5], wide[:, 2:]):  # rows lie apart
            found, wanted = x.clone(memory_format=torch.preserve_format), x.clone()
            kernels.rotate(found, heads, turns)
            TORCH.rotate(wanted, heads, turns)
            assert torch.equal(found, wanted)
            assert torch.equal(found[:, heads:], x[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_gate(kernels: cpu.CpuKernels, n: int, dtype: torch.dtype) -> None:
    x = rows(6, 5, 2 * n, dtype=dtype)
    x[0, 0], x[1, 0] = 200, -200  # where a power of e overflows
    g, u = x.double().chunk(2, dim=-1)
    assert_close(kernels.gate(x), g * torch.sigmoid(g) * u)
    if dtype is torch.float32:
        assert_close(TORCH.gate(x), g * torch.sigmoid(g) * u)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [*SIZES, 4096])
def test_largest(kernels: cpu.CpuKernels, n: int, dtype: torch.dtype) -> None:
    """Also among equals, of which coarse values have many, and where every value is negative."""
    x = torch.cat((rows(1, 5, n + 3), rows(2, 5, n + 3).round(), -rows(3, 5, n + 3).abs())).to(dtype)[:, 3:]
    x[0], x[1, n // 2 :] = -torch.inf, -torch.inf
    x[2], x[2, n // 3] = -0.0, 0.0
    expected = TORCH.largest(x)
    assert kernels.largest(x) == expected
    assert expected[0] == -1
    assert expected[2] == 0


@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf])
def test_what_is_not_finite_has_no_largest(kernels: cpu.CpuKernels, broken: float) -> None:
    for at in (0, 15, 16, 38):
        x = rows(1, 3, 39)
        x[1, at] = broken
        assert kernels.largest(x) == TORCH.largest(x) == [int(x[0].argmax()), -1, int(x[2].argmax())]


def test_what_is_not_a_number_stays_none(kernels: cpu.CpuKernels) -> None:
    """The codec and the sampler find broken values: nothing before them may lose one."""
    for at in (0, 3, 17):
        x = rows(7, 2, 36)
        x[1, at] = torch.nan
        assert torch.isnan(kernels.gate(x)[1]).tolist() == [i == at % 18 for i in range(18)]
        assert torch.isnan(kernels.norm(x, torch.ones(36), 0.0)[1]).all()
        assert torch.isfinite(kernels.norm(x, torch.ones(36), 0.0)[0]).all()


@pytest.mark.parametrize("columns", [172, 4096])
def test_a_row_does_not_depend_on_its_place(kernels: cpu.CpuKernels, columns: int) -> None:
    """Enough rows for several threads."""
    x, weight, turns = rows(8, 300, 2 * columns), rows(9, 2 * columns), rows(10, 300, columns)
    gated, normed, turned = kernels.gate(x), kernels.norm(x, weight, 1e-6), x.view(300, 2, columns).clone()
    kernels.rotate(turned, 2, turns)
    for part in (slice(0, 1), slice(5, 8), slice(299, 300)):
        alone = x[part].view(-1, 2, columns).clone()
        kernels.rotate(alone, 2, turns[part])
        assert torch.equal(alone, turned[part])
        assert torch.equal(kernels.gate(x[part]), gated[part])
        assert torch.equal(kernels.norm(x[part], weight, 1e-6), normed[part])


def decode_spans(positions: list[int], slots: list[int]) -> Spans:
    ones = torch.ones(len(slots), dtype=torch.int64)
    return Spans(torch.tensor(positions), ones, ones.cumsum(0) - 1, torch.zeros(len(slots), 1), torch.tensor(slots))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [6, 64])
def test_append_is_bit_equal(kernels: cpu.CpuKernels, head_dim: int, dtype: torch.dtype) -> None:
    """Rows are slices of Q, K and V; sequences stand in any order of slots, at the ends of pages and inside."""
    qkv, spans = rows(11, 4, 7, head_dim, dtype=dtype), decode_spans([0, 31, 32 * 9 + 7, 63], [5, 0, 2, 3])
    k, v = qkv[:, 3:5], qkv[:, 5:]
    k[0, 0, 0], v[3, 1, 1] = 65504.0 if dtype is not torch.bfloat16 else 65280.0, 1e-7
    found, wanted = (torch.zeros(2, 6, 2, 32, head_dim, dtype=torch.float16) for _ in range(2))
    assert kernels.append(found[0], found[1], spans, k, v)
    assert TORCH.append(wanted[0], wanted[1], spans, k, v)
    assert torch.equal(found, wanted)
    assert bool(found[:, 1].eq(0).all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 7e4])
@pytest.mark.parametrize("tensor", [0, 1])
def test_nothing_is_appended_where_a_value_is_not_finite(kernels: cpu.CpuKernels, tensor: int, broken: float) -> None:
    given = rows(12, 2, 3, 2, 24)
    given[tensor, 2, 1, 23] = broken
    for each in (kernels, TORCH):
        pages = torch.zeros(2, 3, 2, 32, 24, dtype=torch.float16)
        assert not each.append(pages[0], pages[1], decode_spans([1, 2, 3], [0, 1, 2]), given[0], given[1])
        assert bool(pages.eq(0).all())


def test_wrong_inputs_are_named(kernels: cpu.CpuKernels) -> None:
    x, pages = rows(13, 4, 2, 16), torch.zeros(3, 2, 32, 16, dtype=torch.float16)
    good = decode_spans([0, 1, 2, 3], [0, 1, 2, 2])
    for spans in (decode_spans([0, 1, 2, 3], [0, 1, 2, 3]), decode_spans([0, 1, 2, -1], [0, 1, 2, 2])):
        with pytest.raises(ValueError, match="sequence 3"):
            kernels.append(pages, pages, spans, x, x)
    with pytest.raises(ValueError, match="starts"):
        kernels.append(pages, pages, decode_spans([0], [0]), x, x)
    with pytest.raises(ValueError, match="none of them 0"):
        kernels.append(pages[:, :, :0], pages[:, :, :0], good, x, x)
    with pytest.raises(ValueError, match="open_v is"):
        kernels.append(pages, pages.view(3, 2, 16, 32), good, x, x)
    with pytest.raises(ValueError, match="v has the wrong shape or dtype for k"):
        kernels.append(pages, pages, good, x, x[:, :1])
    with pytest.raises(ValueError, match=r"k has the wrong shape or dtype$"):
        kernels.append(pages, pages, good, x[:, :1], x)
    for wrong, name in ((x.long(), "v"), (x[0, 0], "v"), (x[:, :0], "v")):
        with pytest.raises(ValueError, match=rf"^{name} "):
            kernels.append(pages, pages, good, x, wrong)
    with pytest.raises(ValueError, match="turns"):
        kernels.rotate(x, 2, rows(14, 3, 16))
    with pytest.raises(ValueError, match="lacks heads"):
        kernels.rotate(x, 3, rows(14, 4, 16))
    with pytest.raises(ValueError, match="turns must be contiguous"):
        kernels.rotate(x, 2, rows(14, 16, 4).T)
    with pytest.raises(ValueError, match="weight"):
        kernels.norm(x[:, 0], torch.ones(15), 1e-6)
    with pytest.raises(ValueError, match="more"):
        kernels.norm(x[:, 0], torch.ones(16), 1e-6, x[:2, 0])
    with pytest.raises(ValueError, match="odd"):
        kernels.gate(rows(15, 2, 7))
    with pytest.raises(ValueError, match="x must be contiguous"):
        kernels.gate(rows(15, 8, 2).T)
    with pytest.raises(ValueError, match="x must be float32, float16 or bfloat16"):
        kernels.gate(x[:, 0].short())
