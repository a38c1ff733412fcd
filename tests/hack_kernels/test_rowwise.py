"""Operations on single rows in C++, on every instruction set, against their torch form."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable, Pool, RowKernels, Spans
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.rowwise import Rowwise
from hack_kernels.window import Window
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

TORCH = Rowwise()


def flags(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bool)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 15, 16, 172, 768]
"""Columns: less than a vector, whole vectors, and vectors with a rest."""


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    return cpu.CpuBackend(request.param, threads=2).rows


@pytest.fixture(params=[*ISAS, "triton"])
def fused(request: pytest.FixtureRequest) -> RowKernels:
    """The row kernels of each backend with its own kernels for these operations."""
    if request.param == "triton":
        found: RowKernels = pytest.importorskip("hack_kernels.triton.backend").TritonBackend(torch.device("cpu")).rows
        return found
    return cpu.CpuBackend(request.param, threads=2).rows


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(found: Tensor, exact: Tensor) -> None:
    """Assert that `found` is FP64's result within one rounding to the dtype and a few of FP32."""
    step = torch.finfo(found.dtype).eps
    assert bool(((found.double() - exact).abs() <= (step / 2 + 2e-6) * exact.abs() + 1e-7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_norm(fused: RowKernels, n: int, dtype: torch.dtype) -> None:
    x, more, weight = rows(1, 7, n, dtype=dtype), rows(2, 7, n, dtype=dtype), rows(3, n, dtype=dtype)
    summed = x + more
    for terms in (None, more):
        wide = (x if terms is None else summed).double()
        exact = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for each in (fused, TORCH):
            given = x.clone()
            assert_close(each.norm(given, weight, 1e-5, terms), exact)
            assert torch.equal(given, x if terms is None else summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 16, 96, 128])
def test_rotate_is_bit_equal(fused: RowKernels, head_dim: int, dtype: torch.dtype) -> None:
    wide, cos_sin = rows(4, 9, 7, head_dim, dtype=dtype), rows(5, 9, head_dim)
    for heads in (1, 3, 5):
        for x in (wide[:, :5], wide[:, 2:]):  # rows lie apart
            found, wanted = x.clone(memory_format=torch.preserve_format), x.clone()
            fused.rotate(found, heads, cos_sin)
            TORCH.rotate(wanted, heads, cos_sin)
            assert torch.equal(found, wanted)
            assert torch.equal(found[:, heads:], x[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_gate(fused: RowKernels, n: int, dtype: torch.dtype) -> None:
    x = rows(6, 5, 2 * n, dtype=dtype)
    x[0, 0], x[1, 0] = 200, -200  # where a power of e overflows
    g, u = x.double().chunk(2, dim=-1)
    assert_close(fused.gate(x), g * torch.sigmoid(g) * u)
    if dtype is torch.float32:
        assert_close(TORCH.gate(x), g * torch.sigmoid(g) * u)


def test_what_is_not_a_number_stays_none(fused: RowKernels) -> None:
    """The codec and the sampler detect broken values, so no operation before them may lose one."""
    for at in (0, 3, 17):
        x = rows(7, 2, 36)
        x[1, at] = torch.nan
        assert torch.isnan(fused.gate(x)[1]).tolist() == [i == at % 18 for i in range(18)]
        assert torch.isnan(fused.norm(x, torch.ones(36), 0.0)[1]).all()
        assert torch.isfinite(fused.norm(x, torch.ones(36), 0.0)[0]).all()


@pytest.mark.parametrize("columns", [172, 4096])
def test_a_row_does_not_depend_on_its_place(fused: RowKernels, columns: int) -> None:
    """Enough rows for several threads."""
    x, weight, cos_sin = rows(8, 300, 2 * columns), rows(9, 2 * columns), rows(10, 300, columns)
    gated, normed, rotated = fused.gate(x), fused.norm(x, weight, 1e-6), x.view(300, 2, columns).clone()
    fused.rotate(rotated, 2, cos_sin)
    for part in (slice(0, 1), slice(5, 8), slice(299, 300)):
        alone = x[part].view(-1, 2, columns).clone()
        fused.rotate(alone, 2, cos_sin[part])
        assert torch.equal(alone, rotated[part])
        assert torch.equal(fused.gate(x[part]), gated[part])
        assert torch.equal(fused.norm(x[part], weight, 1e-6), normed[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (15, 7), (64, 172), (172, 65), (576, 960)])
def test_product(kernels: RowKernels, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Results agree within the rounding of a sum in FP32, for one row, several, and more than a work item has."""
    weight, bias = rows(15, outputs, inputs, dtype=dtype), rows(16, outputs, dtype=dtype)
    for count in (0, 1, 3, 70):
        x = rows(17, count, inputs, dtype=dtype)
        for b in (None, bias):
            found = kernels.product(x, weight, b)
            exact = TORCH.product(x.float(), weight.float(), None if b is None else b.float())
            size = x.float().abs() @ weight.float().abs().T + (0 if b is None else b.float().abs())
            step = torch.finfo(dtype).eps
            assert bool(((found.float() - exact).abs() <= step * exact.abs() + 1e-6 * size).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(172, 64), (1024, 1376)])
def test_a_product_depends_on_its_row_alone(kernels: RowKernels, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """The bits are the same for any batch, any place in it, any number of threads, and rows that lie apart."""
    apart, weight = rows(18, 260, 2 * inputs, dtype=dtype), rows(19, outputs, inputs, dtype=dtype)
    x = apart[:, :inputs]
    whole = kernels.product(x, weight)
    for start, size in [(0, 1), (3, 1), (259, 1), (5, 2), (8, 3), (1, 5), (2, 7), (0, 64), (7, 129), (100, 131)]:
        part = slice(start, start + size)
        assert torch.equal(kernels.product(x[part].contiguous(), weight), whole[part])
    for threads in (1, 3, 8):
        assert torch.equal(
            cpu.CpuBackend(ISAS[0], threads).rows.product(x, weight), cpu.CpuBackend(ISAS[0], 2).rows.product(x, weight)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(1, 70), st.integers(1, 100), st.integers(1, 140), st.integers(0, 3))
def test_products_of_any_shape(dtype: torch.dtype, isa: str, count: int, inputs: int, outputs: int, skip: int) -> None:
    """Weights begin at any address and tiles may be partial. NaN in one row stays in that row."""
    kernels = cpu.CpuBackend(isa, threads=2).rows
    apart, around = rows(20, count, inputs + skip, dtype=dtype), rows(21, outputs * inputs + skip + 40, dtype=dtype)
    x, end = apart[:, skip:], skip + outputs * inputs
    around[end:] = torch.nan  # memory behind a weight is not multiplied
    weight = around[skip:end].view(outputs, inputs)
    found = kernels.product(x, weight)
    exact, size = x.float() @ weight.float().T, x.float().abs() @ weight.float().abs().T
    assert bool(((found.float() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6 * size).all())
    for at in {0, count // 2, count - 1}:
        assert torch.equal(kernels.product(x[at : at + 1], weight)[0], found[at])
    x[count // 2, inputs - 1] = torch.nan
    broken = kernels.product(x, weight)
    assert bool(torch.isnan(broken[count // 2]).all())
    others = torch.arange(count) != count // 2
    assert torch.equal(broken[others], found[others])
    x[count // 2] = 0
    around[skip] = torch.inf
    assert torch.isnan(kernels.product(x, weight)[count // 2]).tolist() == [n == 0 for n in range(outputs)]


def pool_of(open_k: Tensor, open_v: Tensor) -> Pool:
    return Pool({}, open_k, open_v)


def decode_spans(positions: list[int], slots: list[int]) -> Spans:
    ones = torch.ones(len(slots), dtype=torch.int64)
    return Spans(torch.tensor(positions), ones, ones.cumsum(0) - 1, torch.zeros(len(slots), 1), torch.tensor(slots))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [6, 64])
def test_append_is_bit_equal(fused: RowKernels, head_dim: int, dtype: torch.dtype) -> None:
    """Rows are slices of Q, K and V. Sequences use slots in any order, and end at or inside page boundaries."""
    qkv, spans = rows(11, 4, 7, head_dim, dtype=dtype), decode_spans([0, 31, 32 * 9 + 7, 63], [5, 0, 2, 3])
    k, v = qkv[:, 3:5], qkv[:, 5:]
    k[0, 0, 0], v[3, 1, 1] = 65504.0 if dtype is not torch.bfloat16 else 65280.0, 1e-7
    found, wanted = (torch.zeros(2, 6, 2, 32, head_dim, dtype=torch.float16) for _ in range(2))
    for each, pages in ((fused, found), (TORCH, wanted)):
        faulty = flags(len(spans.slots))
        each.append(pool_of(pages[0], pages[1]), spans, k, v, faulty)
        assert not bool(faulty.any())
    assert torch.equal(found, wanted)
    assert bool(found[:, 1].eq(0).all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 7e4])
@pytest.mark.parametrize("tensor", [0, 1])
def test_a_row_that_is_not_finite_is_flagged_and_not_written(fused: RowKernels, tensor: int, broken: float) -> None:
    """The other rows are written as without it. A flag that is set stays set."""
    given = rows(12, 2, 3, 2, 24)
    given[tensor, 2, 1, 23] = broken
    spans = decode_spans([1, 2, 3], [0, 1, 2])
    for each in (fused, TORCH):
        pages, faulty = torch.zeros(2, 3, 2, 32, 24, dtype=torch.float16), flags(3)
        faulty[0] = True
        each.append(pool_of(pages[0], pages[1]), spans, given[0], given[1], faulty)
        assert faulty.tolist() == [True, False, True]
        assert each.set_in(faulty) == [0, 2]
        assert bool(pages[:, 2].eq(0).all())
        for slot in (0, 1):
            assert torch.equal(pages[:, slot, :, spans.starts[slot]], given[:, slot].half())
            assert int(pages[:, slot].count_nonzero()) == 2 * 2 * 24


@pytest.mark.parametrize("window", [Window(), Window(1, 2), Window(2, 0), Window(0, 2)], ids=str)
def test_append_finds_the_place_of_a_window(fused: RowKernels, window: Window) -> None:
    """Pages are sinks, in the ring, or in the ring after it wraps. A faulty row is not written, and another row in the
    same slot is written all the same."""
    pi, numbers = 16, [0, 15, 16, 33, 48 + 7, 16 * 64 + 1, 16 * 65 + 2, 16 * 66 + 15, 4]
    slots = [*range(7, -1, -1), 7]
    qkv, spans = rows(40, len(numbers), 10, 32, dtype=torch.bfloat16), decode_spans(numbers, slots)
    k, v = qkv[:, 6:8], qkv[:, 8:]
    v[0, 1, 31], k[3, 0, 0] = torch.inf, torch.nan
    found, wanted = (torch.zeros(2, 8, 2, window.pages * pi, 32, dtype=torch.float16) for _ in range(2))
    for each, pages in ((fused, found), (TORCH, wanted)):
        faulty = flags(len(numbers))
        each.append(Pool({}, pages[0], pages[1], window=window), spans, k, v, faulty)
        assert each.set_in(faulty) == [0, 3]
    assert torch.equal(found, wanted)
    assert found.any(dim=-1).sum(dim=(2, 3)).tolist() == [[2] * 4 + [0] + [2] * 3] * 2


def prefill_spans(counts: list[int]) -> Spans:
    each, zeros = torch.tensor(counts), torch.zeros(len(counts), dtype=torch.int64)
    return Spans(zeros, each, each.cumsum(0) - each, zeros[:, None], zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_is_bit_equal(kernels: RowKernels, dtype: torch.dtype) -> None:
    """Rows are slices of Q, K and V, enough for several threads; the largest and the smallest that FP16 holds."""
    k, v = (rows(26, 700, 7, 24, dtype=dtype)[:, part] for part in (slice(3, 5), slice(5, 7)))
    k[3, 1, 5], v[9, 0, 0] = 65504.0 if dtype is not torch.bfloat16 else 65280.0, 1e-7
    for each in (kernels, TORCH):
        faulty = flags(3)
        narrowed = each.narrow(k, v, prefill_spans([650, 1, 49]), faulty)
        assert all(torch.equal(x, y.half()) and x.is_contiguous() for x, y in zip(narrowed, (k, v), strict=True))
        assert not bool(faulty.any())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 7e4])
@pytest.mark.parametrize("tensor", [0, 1])
def test_a_prompt_at_fault_is_flagged_and_its_row_is_zeros(kernels: RowKernels, tensor: int, broken: float) -> None:
    """Other rows are as without it. A flag that is set stays set."""
    given = rows(16, 2, 9, 2, 24)
    for row, span in ((0, 0), (3, 0), (4, 1), (8, 3)):
        broken_in = given.clone()
        broken_in[tensor, row, 1, 3] = broken
        expected = given.half()
        expected[:, row] = 0
        for each in (kernels, TORCH):
            faulty = flags(4)
            faulty[2] = True
            narrowed = each.narrow(broken_in[0], broken_in[1], prefill_spans([4, 2, 1, 2]), faulty)
            assert torch.equal(torch.stack(narrowed), expected)
            assert faulty.nonzero().flatten().tolist() == sorted({span, 2})


def test_wrong_inputs_are_named(kernels: RowKernels) -> None:
    x, pages = rows(13, 4, 2, 16), torch.zeros(3, 2, 32, 16, dtype=torch.float16)
    good = decode_spans([0, 1, 2, 3], [0, 1, 2, 2])
    for spans in (decode_spans([0, 1, 2, 3], [0, 1, 2, 3]), decode_spans([0, 1, 2, -1], [0, 1, 2, 2])):
        with pytest.raises(ValueError, match="sequence 3"):
            kernels.append(pool_of(pages, pages), spans, x, x, flags(4))
    with pytest.raises(ValueError, match="starts"):
        kernels.append(pool_of(pages, pages), decode_spans([0], [0]), x, x, flags(4))
    with pytest.raises(ValueError, match="none of them 0"):
        kernels.append(pool_of(pages[:, :, :0], pages[:, :, :0]), good, x, x, flags(4))
    with pytest.raises(ValueError, match="open_v is"):
        kernels.append(pool_of(pages, pages.view(3, 2, 16, 32)), good, x, x, flags(4))
    with pytest.raises(ValueError, match="v has the wrong shape or dtype for k"):
        kernels.append(pool_of(pages, pages), good, x, x[:, :1], flags(4))
    with pytest.raises(ValueError, match=r"k has the wrong shape or dtype$"):
        kernels.append(pool_of(pages, pages), good, x[:, :1], x, flags(4))
    for wrong, name in ((x.long(), "v"), (x[0, 0], "v"), (x[:, :0], "v")):
        with pytest.raises(ValueError, match=rf"^{name} "):
            kernels.append(pool_of(pages, pages), good, x, wrong, flags(4))
    for counts in ([3], [5], [-1, 5]):
        with pytest.raises(ValueError, match=r"^counts"):
            kernels.narrow(x, x, prefill_spans(counts), flags(len(counts)))
    with pytest.raises(ValueError, match=r"^faulty"):
        kernels.narrow(x, x, prefill_spans([4]), flags(2))
    with pytest.raises(ValueError, match=r"^v has the wrong shape"):
        kernels.narrow(x, x[:, :1], prefill_spans([4]), flags(1))
    for weight, bias, name in (
        (rows(14, 5, 17), None, "weight is"),
        (rows(14, 5, 16).half(), None, "weight has"),
        (rows(14, 16, 5).T, None, "weight must be contiguous"),
        (rows(14, 5, 16), rows(14, 4), "bias"),
        (rows(14, 5, 16), rows(14, 5).half(), "bias"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}"):
            kernels.product(x[:, 0], weight, bias)
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
