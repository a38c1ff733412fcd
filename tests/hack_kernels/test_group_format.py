"""Integer codes in groups: bounds on errors, and known mistakes of the papers' implementations."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.reference.groups import GroupReference
from hypothesis import given
from hypothesis import strategies as st

from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.reading import GROUPS


@pytest.mark.parametrize("fmt", GROUPS, ids=str)
@given(seed=st.integers(0, 2**31), loud=st.floats(1e-6, 10000.0))
def test_errors_are_at_most_half_a_step(fmt: GroupFormat, seed: int, loud: float) -> None:
    kernels, rows = GroupReference(fmt, CPU), random_rows(seed, 2, 1, fmt.page_tokens, fmt.head_dim)
    rows[..., :3] *= loud
    rows = rows.clamp(-65000, 65000).half()
    for name in ("k", "v"):
        side, planes = fmt.side(name), kernels.quantize(name, rows)
        step = planes[f"{name}_scale"].double() / max(side.centre, 1)
        wide = step.repeat_interleave(side.group, -2 if side.by_channel else -1)
        error = (kernels.dequantize(name, planes).double() - rows.double()).abs()
        assert bool((error <= wide / 2 * (1 + 1e-3) + 1e-6 * rows.double().abs()).all())


@pytest.mark.parametrize("fmt", GROUPS, ids=str)
def test_constant_and_empty_pages_are_exact(fmt: GroupFormat) -> None:
    """Rows of 0 have a scale other than 0, so nothing is divided by 0."""
    kernels = GroupReference(fmt, CPU)
    for value in (0.0, -0.0, 3.0, -65504.0):
        rows = torch.full((1, 1, fmt.page_tokens, fmt.head_dim), value, dtype=torch.float16)
        for name in ("k", "v"):
            assert torch.allclose(kernels.dequantize(name, kernels.quantize(name, rows)), rows.float(), rtol=1e-6)


def test_a_group_of_keys_is_several_rows_of_one_channel() -> None:
    """A group has the declared number of rows. Keys that are coded row by row would be exact but count as codes."""
    fmt = GroupFormat(64, Grouping(2, 16, by_channel=True), Grouping(2, 64), 32)
    kernels, rows = GroupReference(fmt, CPU), random_rows(1, 1, 1, 32, 64).half()
    planes = kernels.quantize("k", rows)
    assert planes["k_scale"].shape == (1, 1, 2, 64)
    first, second = rows[0, 0, :16], rows[0, 0, 16:]
    assert torch.equal(planes["k_min"][0, 0], torch.stack((first.amin(0), second.amin(0))))
    for half in kernels.dequantize("k", planes)[0, 0].split(16):
        assert all(2 <= half[:, channel].unique().numel() <= 4 for channel in range(64))


def test_wrong_groups_are_named() -> None:
    with pytest.raises(ValueError, match="k: groups of 48 do not divide page_tokens, which is 64"):
        GroupFormat(64, Grouping(2, 48, by_channel=True), Grouping(2, 32))
    with pytest.raises(ValueError, match="v: groups of 48 do not divide head_dim, which is 64"):
        GroupFormat(64, Grouping(2, 32), Grouping(2, 48))
    with pytest.raises(ValueError, match="v: codes of 3 bits"):
        GroupFormat(64, Grouping(2, 32), Grouping(3, 32))
    with pytest.raises(ValueError, match="k: codes around 8 need 4 bits"):
        GroupFormat(64, Grouping(4, 64, centre=8), Grouping(2, 32))
