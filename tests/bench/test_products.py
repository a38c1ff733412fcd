"""The bench of matrix products, at one small shape."""

from __future__ import annotations

import pytest
from hack_kernels.cpu import CpuBackend

from bench import products


@pytest.mark.parametrize("form", products.FORMS, ids=str)
def test_a_row_names_both_contenders(form: products.Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ROUNDS", 1)
    cells = products.row(CpuBackend(threads=1), form, (64, 32), 2).strip("|").split("|")
    assert len(cells) == products.HEAD.strip("|").count("|") + 1
    numbers = cells[4:] if form.bits else cells[4:-1]  # weights as numbers have one rival
    assert all(float(cell) > 0 for cell in numbers)
