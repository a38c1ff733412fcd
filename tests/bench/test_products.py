"""The bench of matrix products, at one small shape."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.cpu import CpuBackend

from bench import products


@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
def test_a_row_names_both_contenders(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROUNDS", 1)
    cells = products.row(CpuBackend(threads=1), dtype, (64, 32), 2).strip("|").split("|")
    assert len(cells) == products.HEAD.strip("|").count("|") + 1
    assert all(float(cell) > 0 for cell in cells[4:])
