"""Conversions between small floating-point numbers and their codes in Triton's kernels."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.reference.floats import decode

pytest.importorskip("triton")

import triton
import triton.language as tl
from hack_kernels.triton.float_layout import float_layout, widened
from hack_kernels.triton.float_seal import encoded


@pytest.mark.parametrize("element", Element)
def test_every_code_widens_to_what_it_stands_for_and_comes_back(element: Element) -> None:
    layout = float_layout(FloatFormat(64, element, Scaling.POWER))

    @triton.jit  # type: ignore[untyped-decorator]
    def widen(codes, out, back, LAYOUT: tl.constexpr, LOWER: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, COUNT)
        values = widened(tl.load(codes + at), LOWER, LAYOUT).to(tl.float32) * LAYOUT.unit
        tl.store(out + at, values)
        code = encoded(tl.abs(values), LAYOUT.exponent_bits, LAYOUT.mantissa_bits, LAYOUT.finite)
        tl.store(back + at, code.to(tl.uint8))

    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    unsigned = codes & (2 ** (element.bits - 1) - 1)
    finite, garbage = unsigned < element.finite, codes * 7 & (2 ** (8 - element.bits) - 1)
    for lower in (False, True) if element.bits == 4 else (False,):
        stored = codes | (garbage << 4) if lower else (codes << (8 - element.bits)) | garbage
        out, back = torch.empty(len(codes), dtype=torch.float32), torch.empty(len(codes), dtype=torch.uint8)
        widen[(1,)](stored, out, back, layout, lower, len(codes))
        assert torch.equal(out[finite], decode(element, codes)[finite])
        assert torch.equal(back[finite], unsigned[finite])
