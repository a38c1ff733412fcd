"""The bench of matrix products, at one small shape."""

from __future__ import annotations

import pytest
from hack_kernels.cpu import CpuBackend

from bench import products


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("form", products.FORMS, ids=str)
def test_a_row_names_both_contenders(form: products.Form, cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROUNDS", 1)
    monkeypatch.setattr(products, "SWEPT_BYTES", 1 << 20)
    cells = products.row(CpuBackend(threads=1), form, (64, 32), 2, cold).strip("|").split("|")
    assert ("cold" in cells[2]) is cold
    assert len(cells) == products.HEAD.strip("|").count("|") + 1
    numbers = cells[4:] if form.bits else cells[4:-1]  # weights as numbers have one rival
    assert all(float(cell) > 0 for cell in numbers)
