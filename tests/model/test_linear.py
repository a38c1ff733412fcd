"""Packed weights change the speed of a product and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hackkv.model.linear import linear, packed


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 65, 512])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 96), (1536, 256), (172, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_bit_equal(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    for b in (None, bias):
        assert torch.equal(linear(x, packed(weight), b), F.linear(x, weight, b))
