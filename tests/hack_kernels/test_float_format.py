"""Small floating-point numbers: the definition agrees with `ml_dtypes`, and scales follow OCP MX v1.0 and NVFP4."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.reference.floats import FloatReference, decode, encode
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows

ORACLE = {
    Element.E4M3: ml_dtypes.float8_e4m3fn,
    Element.E3M2: ml_dtypes.float6_e3m2fn,
    Element.E2M3: ml_dtypes.float6_e2m3fn,
    Element.E2M1: ml_dtypes.float4_e2m1fn,
}
every_element = pytest.mark.parametrize("element", Element)


def oracle_codes(element: Element, x: Tensor) -> Tensor:
    """The codes that `ml_dtypes` gives x, clamped to the range of the element."""
    clamped = x.float().clamp(-element.largest, element.largest).numpy()
    return torch.from_numpy(clamped.astype(ORACLE[element]).view(np.uint8))


def oracle_values(element: Element, codes: Tensor) -> Tensor:
    return torch.from_numpy(codes.numpy().view(ORACLE[element]).astype(np.float32))


def codes_without_sign(element: Element) -> Tensor:
    """All codes of finite numbers without a sign."""
    return torch.arange(element.finite, dtype=torch.uint8)


def planes_of(fmt: FloatFormat, rows: Tensor) -> dict[str, Tensor]:
    return FloatReference(fmt, CPU).quantize("k", rows)


@every_element
def test_elements_are_those_of_the_standard(element: Element) -> None:
    largest = {Element.E4M3: 448.0, Element.E3M2: 28.0, Element.E2M3: 7.5, Element.E2M1: 6.0}
    assert element.largest == largest[element] == oracle_values(element, codes_without_sign(element))[-1]
    assert float(element.sizes[1]) == oracle_values(element, codes_without_sign(element))[1]


@every_element
def test_every_code_comes_back_and_means_what_the_oracle_says(element: Element) -> None:
    codes = codes_without_sign(element)
    codes = torch.cat((codes, codes | 1 << (element.bits - 1)))
    values = decode(element, codes)
    assert torch.equal(values, oracle_values(element, codes))
    assert torch.equal(encode(element, values), codes)


@every_element
def test_every_fp16_number_gets_the_code_of_the_oracle(element: Element) -> None:
    """The numbers include ties, subnormals, zeros of both signs and values that saturate."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = halves[halves.isfinite()]
    for scale in (1.0, 1 / 3, 2.0**-8):
        x = finite.float() * scale
        assert torch.equal(encode(element, x), oracle_codes(element, x))


@every_element
def test_ties_go_to_the_even_code(element: Element) -> None:
    sizes = element.sizes[: element.finite]
    codes = encode(element, (sizes[1:] + sizes[:-1]) / 2).long()
    assert bool((codes % 2 == 0).all())
    assert bool(((codes - torch.arange(element.finite - 1)).abs() <= 1).all())


@pytest.mark.parametrize("exponent", [*range(-14, 16), -22, -20])
@every_element
def test_scales_of_blocks_are_powers_of_two_by_the_largest_exponent(element: Element, exponent: int) -> None:
    """The largest value of a block is a power of two, the number below one, or between two powers."""
    fmt, power = FloatFormat(32, element, Scaling.POWER, 8), 2.0**exponent
    rows = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    rows[0, 0, 0, 3], rows[0, 0, 1, 5] = power, -power * 1.5
    below = (torch.tensor(power).half().view(torch.int16) - 1).view(torch.float16)
    rows[0, 0, 2, 7] = below
    scales = planes_of(fmt, rows)["k_scale"][0, 0, :, 0]
    top = math.floor(math.log2(element.largest))
    under = math.floor(math.log2(float(below)))
    assert scales.tolist() == [exponent - top + 127, exponent - top + 127, under - top + 127, *[0] * 5]
    powers = torch.from_numpy(scales[:3].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert torch.equal(powers, 2.0 ** (scales[:3].float() - 127))


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("scaling", Scaling)
@every_element
@given(seed=st.integers(0, 2**31), loud=st.floats(1e-4, 1000.0))
def test_errors_are_at_most_half_a_step_unless_a_value_saturates(
    element: Element, scaling: Scaling, seed: int, loud: float
) -> None:
    fmt = FloatFormat(64, element, scaling, 8)
    rows = random_rows(seed, 1, 2, 8, 64)
    rows[..., :3] *= loud
    rows[..., 16:32] /= loud
    rows = rows.clamp(-65000, 65000).half()
    kernels = FloatReference(fmt, CPU)
    planes = kernels.quantize("k", rows)
    found, x = kernels.dequantize("k", planes).double(), rows.double()
    scale = block_scales(fmt, planes)
    sizes = element.sizes[: element.finite].double()
    at = torch.searchsorted(sizes, (x.abs() / scale).clamp(max=element.largest).contiguous()).clamp(1)
    step = (sizes[at] - sizes[at - 1]) * scale
    saturated = x.abs() > element.largest * scale * (1 + 1e-6)  # scales are rounded to FP32
    assert bool(((found - x).abs() <= step / 2 + 1e-6 * x.abs())[~saturated].all())
    assert torch.allclose(found[saturated].abs(), (element.largest * scale)[saturated], rtol=1e-6)
    if scaling is Scaling.PAGE:
        assert not bool(saturated.any())


def block_scales(fmt: FloatFormat, planes: dict[str, Tensor]) -> Tensor:
    """The scale of each value, [..., Π, D] FP64; 1 in place of 0."""
    if fmt.scaling is Scaling.PAGE:
        scale = planes["k_scale"][..., None].double()
        return scale.expand(*scale.shape[:-2], fmt.page_tokens, fmt.head_dim)
    if fmt.scaling is Scaling.POWER:
        scale = 2.0 ** (planes["k_scale"].double() - 127)
    else:
        scale = oracle_values(Element.E4M3, planes["k_scale"]) * planes["k_gain"][..., None]
    wide = scale.double().repeat_interleave(fmt.block, -1)
    return torch.where(wide == 0, torch.finfo(torch.float64).tiny, wide)


@pytest.mark.parametrize("scaling", Scaling)
@every_element
def test_pages_of_zeros_are_zeros(element: Element, scaling: Scaling) -> None:
    fmt = FloatFormat(64, element, scaling, 16)
    kernels = FloatReference(fmt, CPU)
    rows = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    assert torch.equal(kernels.dequantize("k", kernels.quantize("k", rows)), rows.float())
    rows[0, 0, 3, 5] = 2.0**-24  # the least number beside zeros
    found = kernels.dequantize("k", kernels.quantize("k", rows))
    assert float(found[0, 0, 3, 5]) == pytest.approx(2.0**-24, rel=0.05)
    found[0, 0, 3, 5] = 0
    assert not bool(found.any())


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match="head_dim is 80; blocks of 32"):
        FloatFormat(80, Element.E2M1, Scaling.POWER)
    with pytest.raises(ValueError, match="page_tokens is 12"):
        FloatFormat(64, page_tokens=12)
