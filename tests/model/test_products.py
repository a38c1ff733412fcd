"""From how many rows on the library multiplies: what times say, and that a processor is asked once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hack_kernels.block_weight import WIDTHS, BlockWeight, Weight
from hack_kernels.rowwise import Rowwise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hackkv.model import products
from hackkv.model.products import GAIN, NEVER, ROWS, library_rows, measure, takeover, unpack_rows

TIMES = st.tuples(*(st.floats(1e-6, 1.0) for _ in range(2)))


@given(st.lists(TIMES, min_size=len(ROWS), max_size=len(ROWS)))
def test_the_library_takes_over_where_it_stays_faster(times: list[tuple[float, float]]) -> None:
    seconds = dict(zip(ROWS, times, strict=True))
    taken = takeover(seconds)
    wins = {rows: ours >= GAIN * library for rows, (ours, library) in seconds.items()}
    assert all(won for rows, won in wins.items() if rows >= taken)
    below = [rows for rows in ROWS if rows < taken]
    assert not below or not wins[below[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_is_asked_once(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = list[int]()

    def own(x: Tensor, weight: Tensor) -> Tensor:
        asked.append(len(x))
        return F.linear(x, weight)

    found = library_rows(own, dtype, "here")
    assert found in (*ROWS, NEVER)
    assert set(asked) == set(ROWS)
    asked.clear()
    assert library_rows(own, dtype, "here") == found
    assert not asked
    library_rows(own, dtype, "elsewhere")
    assert asked


class Counted(Rowwise):
    """Notes the forms of weights that it multiplies."""

    def __init__(self) -> None:
        self.asked = set[int]()

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, BlockWeight):
            self.asked.add(weight.bits)
        return super().product(x, weight, bias)


def test_each_form_is_a_question_of_its_own_and_a_new_version_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "SIDE", 64)
    kernels = Counted()
    for version in ("1", "2"):
        monkeypatch.setattr(products, "VERSION", version)
        for bits in WIDTHS:
            for asked in (set[int]({bits}), set[int]()):
                kernels.asked.clear()
                assert unpack_rows(kernels, bits, torch.float32, "here") in (*ROWS, NEVER)
                assert kernels.asked == asked


def test_both_are_timed() -> None:
    assert all(min(times) > 0 for times in measure(F.linear, torch.float32).values())
