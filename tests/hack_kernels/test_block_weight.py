"""Packed weights: C++ gives the definition's numbers, and the same bits on every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable, RowKernels
from hack_kernels.block_weight import (
    BLOCK,
    LARGEST_DIGIT,
    TILE,
    WIDTHS,
    BlockWeight,
    Matrices,
    nearest_codes,
    pack,
    quantized,
    rounded_rows,
)
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.rowwise import Rowwise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

try:
    ISAS = supported_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

TORCH = Rowwise()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 32), (16, 64), (17, 32), (33, 128), (49, 96), (200, 576)]
"""Rows and columns: less than a tile, whole tiles, tiles with a rest."""
bits_of = pytest.mark.parametrize("bits", WIDTHS)


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    return cpu.CpuBackend(request.param, threads=2).rows


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(rows=st.integers(1, 50), blocks=st.integers(1, 4), bits=st.sampled_from(WIDTHS), seed=st.integers(0, 99))
def test_what_is_packed_comes_back(rows: int, blocks: int, bits: int, seed: int) -> None:
    codes, scale, minimum = nearest_codes(numbers(seed, rows, blocks * BLOCK), bits)
    packed = pack(codes, scale, minimum)
    assert (packed.shape, packed.bits, packed.nbytes % TILE) == ((rows, blocks * BLOCK), bits, 0)
    wide = scale.float().repeat_interleave(BLOCK, 1)
    offset = -128 * wide if minimum is None else minimum.float().repeat_interleave(BLOCK, 1)
    assert torch.allclose(packed.unpacked(), codes * wide + offset, rtol=0, atol=1e-6)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(packed.unpacked(ids=ids), packed.unpacked()[ids])


@bits_of
def test_nearest_codes_are_half_a_step_away(bits: int) -> None:
    weight = numbers(1, 40, 96)
    weight[3, :32], weight[4, :32] = 0, 0.75  # blocks of one value
    codes, scale, minimum = nearest_codes(weight, bits)
    apart = (pack(codes, scale, minimum).unpacked() - weight).abs()
    # A scale is rounded to FP16, so the outermost codes may be a little further away.
    assert bool((apart <= 0.51 * scale.float().repeat_interleave(BLOCK, 1) + 15 * 2**-11).all())
    assert torch.equal(apart[3, :32], torch.zeros(32))


@bits_of
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_rows_are_bit_equal(
    kernels: RowKernels, shape: tuple[int, int], dtype: torch.dtype, bits: int
) -> None:
    weight = quantized(numbers(2, *shape), bits)
    ids = torch.tensor([shape[0] - 1, 0, 0])
    assert torch.equal(kernels.unpack(weight, dtype), weight.unpacked(dtype))
    assert torch.equal(kernels.unpack(weight, dtype, ids), weight.unpacked(dtype, ids))


@bits_of
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_definition_and_bit_equal_among_instruction_sets(
    shape: tuple[int, int], dtype: torch.dtype, bits: int
) -> None:
    outputs, columns = shape
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes[0], codes[-1] = 0, 2**bits - 1
    scale, minimum = (numbers(seed, outputs, columns // BLOCK).half() / 2**bits for seed in (4, 5))
    weight = pack(codes, scale, minimum if bits == 4 else None)
    x, bias = numbers(6, 70, columns, dtype=dtype), numbers(7, outputs)
    x[0], x[1] = 1, 0  # then all codes of x are the largest code
    x[2, :BLOCK] *= 100
    for added in (None, bias.to(dtype)):
        found = [cpu.CpuBackend(isa, threads=2).rows.product(x, weight, added) for isa in ISAS]
        assert all(torch.equal(each, found[0]) for each in found)
        wanted = rounded_rows(x, bits).double() @ weight.unpacked().double().T + (
            0 if added is None else added.double()
        )
        size = rounded_rows(x, bits).double().abs() @ weight.unpacked().double().abs().T + 1
        step = torch.finfo(dtype).eps
        for each in (found[0], TORCH.product(x, weight, added)):
            assert bool(((each.double() - wanted).abs() <= step * wanted.abs() + 1e-6 * size).all())


@bits_of
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: RowKernels, dtype: torch.dtype, bits: int) -> None:
    weight, x = quantized(numbers(6, 200, 576), bits), numbers(7, 150, 576, dtype=dtype)
    x[5::9, 40:70] *= 8  # blocks that stand out
    whole = kernels.product(x, weight)
    for start, count in [(0, 1), (149, 1), (3, 2), (5, 3), (8, 5), (60, 9), (1, 66)]:
        rows = slice(start, start + count)
        assert torch.equal(kernels.product(x[rows], weight), whole[rows])


@bits_of
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_to_two_bytes_and_blocks_that_do_not_stand_out_to_one(dtype: torch.dtype, bits: int) -> None:
    x = numbers(12, 40, 576, dtype=dtype)
    x[:20, 64:96] *= 8
    apart, largest = (
        each.unflatten(1, (-1, BLOCK)).abs().amax(-1) for each in (rounded_rows(x, bits) - x.float(), x.float())
    )
    fine = torch.full_like(largest, dtype != torch.bfloat16 or bits == 8, dtype=torch.bool)
    fine[:20, 2] = True
    step = largest / LARGEST_DIGIT
    assert bool((apart[fine] <= 0.501 * step[fine] / 254 + 1e-6 * largest[fine]).all())
    assert bool((apart[~fine] <= 0.501 * step[~fine]).all())
    assert bool((apart[~fine] > 0.05 * step[~fine]).all())


@bits_of
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(kernels: RowKernels, bits: int, value: float) -> None:
    weight, x = quantized(numbers(8, 20, 64), bits), numbers(9, 3, 64)
    x[1, 40] = value
    for each in (kernels, TORCH):
        found = each.product(x, weight)
        assert bool(found[1].isnan().all())
        assert bool(found[[0, 2]].isfinite().all())


@bits_of
def test_what_does_not_fit_is_refused(kernels: RowKernels, bits: int) -> None:
    weight, x = quantized(numbers(10, 20, 64), bits), numbers(11, 3, 64)
    wrong: list[Callable[[], Tensor]] = [
        lambda: kernels.product(x[:, :32], weight),
        lambda: kernels.product(x, BlockWeight(weight.data, 40)),
        lambda: kernels.product(x, BlockWeight(weight.data.view(torch.int8), 20)),
        lambda: kernels.product(x, weight, numbers(12, 19)),
        lambda: kernels.unpack(weight, torch.float32, torch.tensor([20])),
        lambda: kernels.unpack(weight, torch.float32, torch.tensor([-1])),
        lambda: kernels.unpack(BlockWeight(weight.data, 33), torch.float32),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"weight|bias|ids"):
            call()
    assert kernels.product(x[:0], weight).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_a_layer_is_finished_as_its_operations_would(kernels: RowKernels, dtype: torch.dtype, packed: bool) -> None:
    hidden, heads, ffn = 96, 64, 160
    shapes = ((hidden, heads), (2 * ffn, hidden), (hidden, ffn))
    after, gate_up, down = (numbers(seed, *shape, dtype=dtype) / 8 for seed, shape in enumerate(shapes, 13))
    plain: Matrices = (after, gate_up, down)
    matrices = (quantized(after, 4), quantized(gate_up, 8), down) if packed else plain
    norms = (numbers(16, hidden, dtype=dtype), numbers(17, hidden, dtype=dtype))
    for rows in (1, 3, 40):
        x, mixed = numbers(18, rows, hidden, dtype=dtype), numbers(19, rows, heads, dtype=dtype)
        mine, theirs = x.clone(), x.clone()
        found = kernels.finish_layer(mine, mixed, matrices, norms, 1e-5)
        wanted = Rowwise.finish_layer(cast(Rowwise, kernels), theirs, mixed, matrices, norms, 1e-5)
        assert torch.equal(found, wanted)
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, x)


def test_a_layer_of_other_shapes_is_refused(kernels: RowKernels) -> None:
    x, mixed, norms = numbers(20, 3, 96), numbers(21, 3, 64), (numbers(22, 96), numbers(23, 96))
    fitting = (quantized(numbers(24, 96, 64), 8), quantized(numbers(25, 320, 96), 8), numbers(26, 96, 160))
    for at, other in enumerate([numbers(27, 96, 32), quantized(numbers(28, 300, 96), 8), numbers(29, 90, 160)]):
        matrices = cast(Matrices, (*fitting[:at], other, *fitting[at + 1 :]))
        with pytest.raises(ValueError, match="weight"):
            kernels.finish_layer(x, mixed, matrices, norms, 1e-5)
    with pytest.raises(ValueError, match="norm"):
        kernels.finish_layer(x, mixed, fitting, (norms[0], numbers(30, 95)), 1e-5)
    with pytest.raises(ValueError, match="mixed"):
        kernels.finish_layer(x, mixed[:2], fitting, norms, 1e-5)
