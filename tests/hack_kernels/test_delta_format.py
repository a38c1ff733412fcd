"""Deltas against anchor rows: layout, bounds on errors, and independence of other groups."""

from __future__ import annotations

import pytest
import torch
from hack_kernels.base import Rows
from hack_kernels.delta_format import ANCHOR_CENTRE, DeltaFormat, DeltaSide
from hack_kernels.reference.deltas import DeltaReference
from hypothesis import given
from hypothesis import strategies as st

from tests.hack_kernels.pools import CPU, random_rows
from tests.hack_kernels.reading import DELTAS, EARLY, LATE, filled, one_span

SHAPES = [
    *DELTAS,
    DeltaFormat(32, DeltaSide(4, 3), LATE, 8, group=2),
    DeltaFormat(64, LATE, LATE, 40, group=3, fused=False),
]
every_format = pytest.mark.parametrize("fmt", SHAPES, ids=str)


@every_format
@given(seed=st.integers(0, 2**31), loud=st.floats(1e-7, 65504.0), alike=st.booleans())
def test_errors_are_at_most_half_a_bin_of_the_delta(fmt: DeltaFormat, seed: int, loud: float, alike: bool) -> None:
    """The error of anchors is at most half of a 127th. Rows are arbitrary and include FP16's largest of both signs."""
    x = random_rows(seed, 2, 1, fmt.page_tokens, fmt.head_dim)
    x[..., :3] *= loud
    rows = (x[..., :1, :] + x * 1e-3 if alike else x).clamp(-65504, 65504).half()
    for name in ("k", "v"):
        planes = DeltaReference(fmt, CPU).quantize(name, rows)
        assert {plane: tuple(tensor.shape[2:]) for plane, tensor in planes.items()} == {
            plane.name: plane.shape for plane in fmt.planes if plane.name.startswith(name)
        }
        error = (DeltaReference(fmt, CPU).dequantize(name, planes).double() - rows.double()).abs()
        scale, rounding = planes[f"{name}_scale"].double(), 1e-6 * x.clamp(-65504, 65504).double().abs().amax()
        for where, bound in (
            (fmt.anchors, 1 / (2 * ANCHOR_CENTRE)),
            (fmt.others, 1 / fmt.side(name).centre),  # half of the reach, in bins of the centre
        ):
            assert bool((error[..., where, :] <= scale[..., where, :] * bound * (1 + 1e-5) + rounding).all())


@every_format
@given(data=st.data())
def test_planes_hold_every_code_that_fits(fmt: DeltaFormat, data: st.DataObject) -> None:
    """No value of a delta row moves: rows that are whole codes come back unchanged."""
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kernels, shape = DeltaReference(fmt, CPU), (1, 1, fmt.page_tokens, fmt.head_dim)
    for name in ("k", "v"):
        centre = fmt.side(name).centre
        codes = torch.randint(-centre, centre + 1, shape, generator=draw).float()
        codes[..., 0] = centre  # the reach
        anchors = torch.randint(-127, 128, shape, generator=draw).float()
        anchors[..., 1] = 127
        row = torch.arange(fmt.page_tokens)
        first = row // fmt.group * fmt.group
        rows = torch.where((row == first)[:, None], anchors, anchors[..., first, :] + codes)
        found = kernels.dequantize(name, kernels.quantize(name, rows.half()))
        assert torch.equal(found.round(), rows)
        assert float((found - rows).abs().max()) < 1e-4


@every_format
def test_constant_and_empty_pages_are_exact(fmt: DeltaFormat) -> None:
    """Rows of 0 have a scale other than 0, so nothing is divided by 0. Equal rows have no deltas."""
    kernels = DeltaReference(fmt, CPU)
    for value in (0.0, -0.0, 3.0, -65504.0):
        rows = torch.full((1, 1, fmt.page_tokens, fmt.head_dim), value, dtype=torch.float16)
        for name in ("k", "v"):
            assert torch.equal(kernels.dequantize(name, kernels.quantize(name, rows)), rows.float())


@every_format
def test_a_group_depends_on_its_own_rows_only(fmt: DeltaFormat) -> None:
    """A group also depends on its anchor, which is one of its rows. Any other row changes only itself."""
    kernels, rows = DeltaReference(fmt, CPU), random_rows(2, 1, 1, fmt.page_tokens, fmt.head_dim).half()
    before = kernels.dequantize("k", kernels.quantize("k", rows))
    for changed, same in ((0, torch.arange(fmt.page_tokens) >= fmt.group), (1, torch.arange(fmt.page_tokens) != 1)):
        other = rows.clone()
        other[..., changed, :] = 5 * other[..., changed, :].flip(-1)
        after = kernels.dequantize("k", kernels.quantize("k", other))
        assert torch.equal(after[..., same, :], before[..., same, :])
        assert not torch.equal(after[..., changed, :], before[..., changed, :])


def test_rows_that_resemble_their_anchor_lose_little() -> None:
    """The paper relies on this: a delta has a smaller reach than its row, and so smaller bins."""
    fmt = DELTAS[0]
    kernels, noise = DeltaReference(fmt, CPU), random_rows(3, 1, 1, 32, 64)
    rows = (10 * random_rows(4, 1, 1, 1, 64) + 0.1 * noise).half()
    planes = kernels.quantize("v", rows)
    assert float(planes["v_scale"][..., fmt.others, :].max()) < float(planes["v_scale"][..., fmt.anchors, :].min()) / 10


@every_format
def test_attention_reads_what_pages_stand_for(fmt: DeltaFormat) -> None:
    """The comparison is attention over the dequantized rows."""
    kernels = DeltaReference(fmt, CPU)
    pi, heads = fmt.page_tokens, 2
    k, v = random_rows(5, 2, 2 * pi + 3, heads, fmt.head_dim).half()
    pool = filled(kernels, fmt, k, v)
    q = random_rows(6, 1, 1, 2 * heads, fmt.head_dim)[0]
    out = kernels.attend(0, pool, one_span(2 * pi + 2, 1, 3), Rows(q))
    read = []
    for name, x in (("k", k), ("v", v)):
        planes = {p.name: pool.planes[p.name] for p in fmt.planes if p.name.startswith(name)}
        sealed = kernels.dequantize(name, planes).transpose(1, 2).flatten(0, 1)
        read.append(torch.cat(((sealed if fmt.fused else sealed.half().float()), x[2 * pi :].float())).double())
    for head in range(2 * heads):
        keys, values = (each[:, head // 2] for each in read)
        weights = (keys @ q[0, head].double() / fmt.head_dim**0.5).softmax(0)
        assert torch.allclose(out[0, head].double(), weights @ values, atol=1e-4)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="groups of 1 rows in pages of 64; at least 2"):
        DeltaFormat(64, EARLY, LATE, group=1)
    with pytest.raises(ValueError, match="groups of 65 rows in pages of 64"):
        DeltaFormat(64, EARLY, LATE, group=65)
    with pytest.raises(ValueError, match="k: codes around 8 in 4 bits"):
        DeltaFormat(64, DeltaSide(4, 8), LATE)
    with pytest.raises(ValueError, match="v: codes around 3 in 3 bits"):
        DeltaFormat(64, EARLY, DeltaSide(3, 3))
