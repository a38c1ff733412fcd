"""Codes and metadata of the C++ kernels equal those of the reference bit for bit, and their memory is as specified."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import Rows
from hack_kernels.cpu.memory import LINE_BYTES
from hack_kernels.hack_format import HackFormat, OpenPage, Rounding

from tests.hack_kernels.cpu.cases import FORMATS, LAYER, Case
from tests.hack_kernels.pools import hack_kernels, random_rows, reference


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_equal_the_reference(backend: cpu.CpuBackend, fmt: HackFormat) -> None:
    case = Case(fmt, [3 * fmt.page_tokens], heads=2)
    ids = case.table[0, [2, 0, 1]]
    ours, theirs = (k.export(case.pool(k), ids) for k in (hack_kernels(backend, fmt), reference(fmt)))
    assert ours.keys() == theirs.keys()
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


@pytest.mark.parametrize("open_page", list(OpenPage))
def test_noise_goes_by_the_heads_of_the_model(backend: cpu.CpuBackend, open_page: OpenPage) -> None:
    """A pool of heads 2 and 3 gives the same bytes and attention as a pool of all four heads."""
    fmt = HackFormat(64, 32, rounding=Rounding.STOCHASTIC, open_page=open_page, seed=5)
    kernels, whole, part = hack_kernels(backend, fmt), Case(fmt, [75], heads=4), Case(fmt, [75], heads=2)
    part.k, part.v = ([x[0][:, 2:]] for x in (whole.k, whole.v))
    pool, cut = whole.pool(kernels), part.pool(kernels, head_start=2)
    wire, cut_wire = (kernels.export(x, whole.table[0]) for x in (pool, cut))
    for name, plane in wire.items():
        assert torch.equal(cut_wire[name], plane[2:]), name
    spans, q = whole.decode_spans(pool), random_rows(8, 1, 8, 64)
    part.decode_spans(cut)
    out, cut_out = kernels.attend(LAYER, pool, spans, Rows(q)), kernels.attend(LAYER, cut, spans, Rows(q[:, 4:]))
    assert torch.equal(cut_out, out[:, 4:])


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-14, 1e-3, 300.0, 15000.0])
def test_bytes_equal_the_reference_at_extreme_scales(backend: cpu.CpuBackend, scale: float) -> None:
    fmt = HackFormat(64, 32, 2, 4, rounding=Rounding.STOCHASTIC)
    case = Case(fmt, [64], heads=1)
    case.k, case.v = ([(x[0].float() * scale).clamp(-65504, 65504).half()] for x in (case.k, case.v))
    ids = case.table[0, :2]
    ours, theirs = (k.export(case.pool(k), ids) for k in (hack_kernels(backend, fmt), reference(fmt)))
    for name, plane in theirs.items():
        assert torch.equal(ours[name], plane), name


def test_a_minimum_of_zero_is_positive_whichever_zeros_stand_in_the_partition(backend: cpu.CpuBackend) -> None:
    """-0 and +0 compare equal, so the zero that a minimum finds first depends on the order of the comparisons."""
    fmt = HackFormat(64, 32)
    case = Case(fmt, [64], heads=2)
    for rows in (case.k[0], case.v[0]):
        signs = random_rows(3, *rows.shape)
        rows.copy_(torch.where(signs > 0.5, rows.abs(), torch.where(signs > 0, 0.0, -0.0).half()))
    ids = case.table[0, :2]
    ours, theirs = (k.export(case.pool(k), ids) for k in (hack_kernels(backend, fmt), reference(fmt)))
    for name, plane in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), plane.view(torch.uint8)), name
    assert not bool(theirs["k_min"].signbit().any() or theirs["v_min"].signbit().any())


@pytest.mark.parametrize("num_pages", [0, 3, 700])
def test_planes_of_a_pool_are_zero_apart_and_aligned(num_pages: int) -> None:
    """This also holds for planes in one block of huge pages."""
    formats = [HackFormat(96, 32), HackFormat(64, 32, k_bits=4), HackFormat(96, 32)]
    layers = hack_kernels(cpu.CpuBackend(), formats[0]).new_planes(formats, num_pages, 3)
    assert [list(planes) for planes in layers] == [[spec.name for spec in fmt.planes] for fmt in formats]
    specs = [(spec, layer[spec.name]) for fmt, layer in zip(formats, layers, strict=True) for spec in fmt.planes]
    for spec, plane in specs:
        assert (plane.shape, plane.dtype) == ((num_pages, 3, *spec.shape), spec.dtype)
        assert all(page.is_contiguous() for page in plane)
        assert not plane.any()
        assert all(page.data_ptr() % LINE_BYTES == 0 for page in plane)
        plane.view(torch.uint8).fill_(255)  # the next plane is found zero only if they do not overlap
