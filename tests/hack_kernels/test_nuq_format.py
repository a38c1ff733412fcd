"""Non-uniform levels: bounds on errors, exact outliers, and keys before the rotary embedding."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.nuq_format import NuqFormat, NuqTables, cos_sin_of, normal_poles, rotated
from hack_kernels.reference.nuq import NuqReference, middles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.reading import NUQS, definition, filled, nuq_tables

FREE = [fmt for fmt in NUQS if not fmt.calibrated]
KNOWN = [fmt for fmt in NUQS if fmt.calibrated]


def vectors(fmt: NuqFormat, name: str, rows: Tensor) -> Tensor:
    """Rows [..., Π, D] with the values of a vector last."""
    return rows.mT if fmt.side(name).by_channel else rows


@pytest.mark.parametrize("fmt", FREE, ids=str)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), loud=st.floats(1e-6, 10000.0))
def test_errors_are_at_most_the_way_to_the_nearest_level(fmt: NuqFormat, seed: int, loud: float) -> None:
    """That distance is at most half a gap between levels, or that from the last level to the end of the range."""
    kernels, rows = NuqReference(fmt, CPU), random_rows(seed, 2, 1, fmt.page_tokens, fmt.head_dim)
    rows[..., :3] *= loud
    rows = rows.clamp(-65000, 65000).half()
    for name in ("k", "v"):
        planes, x = kernels.quantize(name, rows), vectors(fmt, name, rows).double()
        found = vectors(fmt, name, kernels.dequantize(name, planes)).double()
        middle, reach = middles(planes[f"{name}_range"].double())
        poles = kernels.poles(name).double()
        nearest = (poles * reach[..., None] + middle[..., None] - x[..., None]).abs().amin(-1)
        at = planes[f"{name}_at"].long().mT
        aside = torch.zeros_like(x, dtype=torch.bool).scatter(-1, at, torch.ones_like(at, dtype=torch.bool))
        slack = 1e-6 * (x.abs() + middle.abs() + reach)
        assert bool(((found - x).abs() <= nearest + slack).all())
        assert torch.equal(found[aside], x[aside])
        assert int(aside.sum(-1).min()) == 2
        widest = max(float(poles.diff().max()) / 2, 1 - float(poles[-1]))
        assert bool((nearest[~aside] <= (reach * widest + slack)[~aside]).all())


@pytest.mark.parametrize("fmt", FREE, ids=str)
def test_constant_and_empty_pages_are_exact(fmt: NuqFormat) -> None:
    kernels = NuqReference(fmt, CPU)
    for value in (0.0, -0.0, 3.0, -65504.0):
        rows = torch.full((1, 1, fmt.page_tokens, fmt.head_dim), value, dtype=torch.float16)
        for name in ("k", "v"):
            assert torch.equal(kernels.dequantize(name, kernels.quantize(name, rows)), rows.float())


def test_an_outlier_costs_the_others_of_its_vector_nothing() -> None:
    fmt = NuqFormat(64, 2, 2, page_tokens=32)
    kernels, rows = NuqReference(fmt, CPU), random_rows(4, 1, 1, 32, 64).half()
    for name, place in (("k", (0, 0, 7, slice(None))), ("v", (0, 0, slice(None), 7))):
        calm = rows.clone()
        calm[place] = 4.0
        loud = calm.clone()
        loud[place] = 60000.0
        found = [kernels.dequantize(name, kernels.quantize(name, each)) for each in (calm, loud)]
        assert bool((found[1][place] == 60000.0).all())
        found[1][place] = found[0][place]
        assert torch.equal(*found)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_without_calibration_are_those_of_a_cut_normal_distribution(bits: int) -> None:
    """These levels have the least mean error: each is the mean of the values nearest to it."""
    poles = torch.tensor(normal_poles(bits), dtype=torch.float64)
    assert torch.equal(poles, -poles.flip(0))
    x = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    weight = torch.exp(-2 * x * x)  # two standard deviations are 1
    nearest = (x[:, None] - poles).abs().argmin(-1)
    total, mass = (
        torch.zeros(2**bits, dtype=torch.float64).index_add(0, nearest, each) for each in (weight * x, weight)
    )
    assert float((total / mass - poles).abs().max()) < 5e-4


@pytest.mark.parametrize("fmt", KNOWN, ids=str)
def test_keys_rest_as_they_were_before_the_rotary_embedding(fmt: NuqFormat) -> None:
    """Before rotation, all keys are one level of each channel. Rows of all pages come back."""
    pages, pi, heads = 3, fmt.page_tokens, 2
    tables, kernels = nuq_tables(fmt, heads), definition(fmt)
    middle, reach = (each[..., 0] for each in middles(tables.k_range.transpose(0, 1)))
    before = (middle + tables.k_poles[1] * reach).expand(pages * pi, heads, fmt.head_dim)
    cos, sin = (each[:, None] for each in cos_sin_of(torch.arange(pages * pi), tables.frequencies))
    k = rotated(before, cos, sin).half()
    pool = filled(kernels, fmt, k, k)
    assert pool.planes["k_first"][:, :, 0].tolist() == [[page * pi] * heads for page in range(pages)]
    keys = {name: plane for name, plane in pool.planes.items() if name.startswith("k")}
    found = kernels.dequantize("k", keys).transpose(1, 2).flatten(0, 1)
    assert float((found - k.float()).abs().max()) <= 2.0**-9 * float(k.abs().max())  # FP16's rounding, there and back


def test_wrong_formats_and_tables_are_named() -> None:
    with pytest.raises(ValueError, match="v: codes of 5 bits"):
        NuqFormat(64, 2, 5)
    with pytest.raises(ValueError, match="page_tokens is 512"):
        NuqFormat(64, 2, 2, page_tokens=512)
    with pytest.raises(ValueError, match="head_dim is 512"):
        NuqFormat(512, 2, 2)
    fmt = NuqFormat(64, 2, 3, calibrated=True)
    good = nuq_tables(fmt, 2)
    good.check(fmt)
    for bad, said in (
        (
            NuqTables(good.k_poles.flip(0), good.v_poles, good.k_range, good.frequencies),
            "k_poles: expected 4 ascending",
        ),
        (NuqTables(good.k_poles, good.v_poles * 9, good.k_range, good.frequencies), "v_poles: expected 8 ascending"),
        (NuqTables(good.k_poles, good.v_poles, good.k_range[:1], good.frequencies), r"k_range: shape \[1, 2, 64\]"),
        (NuqTables(good.k_poles, good.v_poles, good.k_range.flip(0), good.frequencies), "k_range: lo is above hi"),
        (NuqTables(good.k_poles, good.v_poles, good.k_range, good.frequencies[1:]), r"frequencies: shape \[31\]"),
    ):
        with pytest.raises(ValueError, match=said):
            NuqReference(fmt, CPU).calibrate(bad)
