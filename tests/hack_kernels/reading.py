"""Formats whose values are read one by one, their definitions, and pools for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hack_kernels.base import Backend, PageKernels, Pool, Spans
from hack_kernels.cpu.reading import NuqCpu
from hack_kernels.delta_format import DeltaFormat, DeltaSide
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.huffman_format import HuffmanFormat, HuffmanSide, Unit
from hack_kernels.nuq_format import NuqFormat, NuqTables
from hack_kernels.pools import new_pool
from hack_kernels.read_format import ReadFormat
from hack_kernels.reference.deltas import DeltaReference
from hack_kernels.reference.floats import FloatReference
from hack_kernels.reference.groups import GroupReference
from hack_kernels.reference.huffman import HuffmanReference
from hack_kernels.reference.nuq import NuqReference
from hack_kernels.reference.reading import ReadingReference
from torch import Tensor

from tests.hack_kernels.pools import CPU, random_rows

FLOATS = [
    FloatFormat(64, Element.E4M3, Scaling.PAGE, 32),
    FloatFormat(96, Element.E4M3, Scaling.POWER, 64),
    FloatFormat(128, Element.E2M3, Scaling.POWER, 64),
    FloatFormat(64, Element.E3M2, Scaling.POWER, 128),
    FloatFormat(256, Element.E2M1, Scaling.POWER, 32),
    FloatFormat(128, Element.E2M1, Scaling.TWOFOLD, 64),
    FloatFormat(96, Element.E2M1, Scaling.PAGE, 32),
]
GROUPS = [
    GroupFormat(64, Grouping(2, 32, by_channel=True), Grouping(2, 32), 32),
    GroupFormat(128, Grouping(4, 64, by_channel=True), Grouping(4, 128), 64),
    GroupFormat(96, Grouping(4, 16, by_channel=True), Grouping(2, 96), 64),
    GroupFormat(256, Grouping(2, 32, by_channel=True), Grouping(4, 16), 128),
    GroupFormat(64, Grouping(5, 64, centre=15), Grouping(4, 64, centre=7), 32),
    GroupFormat(96, Grouping(4, 96, centre=3), Grouping(5, 96, centre=15), 64),
]
NUQS = [
    NuqFormat(64, 2, 2, page_tokens=32),
    NuqFormat(128, 3, 4, page_tokens=64),
    NuqFormat(96, 4, 3, page_tokens=128),
    NuqFormat(64, 2, 3, calibrated=True, page_tokens=32),
    NuqFormat(256, 4, 2, calibrated=True, page_tokens=64),
]
_TOKEN = HuffmanSide(Unit.TOKEN, 0.15, 2.5)
HUFFMANS = [
    HuffmanFormat(64, HuffmanSide(Unit.BLOCK, 0.05, 3.75), _TOKEN, 32),
    HuffmanFormat(128, HuffmanSide(Unit.CHANNEL, 0.25, 2.375), _TOKEN, 64),
    HuffmanFormat(96, HuffmanSide(Unit.TOKEN, 0.02, 2.0), HuffmanSide(Unit.BLOCK, 0.5, 2.0), 128),
]
EARLY, LATE = DeltaSide(5, 15), DeltaSide(4, 7)
DELTAS = [
    DeltaFormat(64, EARLY, LATE, 32),
    DeltaFormat(96, LATE, EARLY, 64),
    DeltaFormat(32, DeltaSide(4, 3), LATE, 64, group=2),
    DeltaFormat(64, EARLY, EARLY, 128, group=128),
]
DEFINITIONS: dict[type[ReadFormat], Callable[[Any, torch.device], ReadingReference]] = {
    DeltaFormat: DeltaReference,
    FloatFormat: FloatReference,
    GroupFormat: GroupReference,
    HuffmanFormat: HuffmanReference,
    NuqFormat: NuqReference,
}
FORMATS: list[ReadFormat] = [*FLOATS, *GROUPS, *NUQS, *HUFFMANS, *DELTAS]


def nuq_tables(fmt: NuqFormat, heads: int) -> NuqTables:
    """Tables with random poles, ranges around zero, and the frequencies of a rotary embedding."""
    draw = torch.Generator().manual_seed(1)
    k_poles, v_poles = (torch.rand(2**bits, generator=draw).sort().values * 2 - 1 for bits in (fmt.k_bits, fmt.v_bits))
    centre, reach = (torch.rand(heads, fmt.head_dim, generator=draw) * size for size in (1.0, 3.0))
    frequencies = 10000.0 ** -torch.linspace(0, 1, fmt.head_dim // 2)
    return NuqTables(k_poles, v_poles, torch.stack((centre - reach, centre + reach)).half().float(), frequencies)


def calibrated(kernels: PageKernels, fmt: ReadFormat, heads: int = 2) -> PageKernels:
    """`kernels`, with tables if `fmt` needs them."""
    if isinstance(fmt, NuqFormat) and fmt.calibrated:
        assert isinstance(kernels, NuqReference | NuqCpu)
        kernels.calibrate(nuq_tables(fmt, heads))
    return kernels


def definition(fmt: ReadFormat) -> ReadingReference:
    """The definition of `fmt` in torch."""
    kernels = DEFINITIONS[type(fmt)](fmt, CPU)
    calibrated(kernels, fmt)
    return kernels


def kernels_of(backend: Backend, fmt: ReadFormat) -> PageKernels:
    """A backend's kernels for `fmt`, or the definition."""
    make: Callable[[ReadFormat, torch.device], PageKernels] = lambda fmt, _: definition(fmt)  # noqa: E731
    return calibrated(backend.kernels_for(fmt, make), fmt)


def unfused(fmt: ReadFormat) -> ReadFormat:
    """The same format without fused reading: pages become FP16 rows first."""
    assert isinstance(fmt, FloatFormat | GroupFormat | NuqFormat | HuffmanFormat | DeltaFormat)
    return replace(fmt, fused=False)


def filled(kernels: PageKernels, fmt: ReadFormat, k: Tensor, v: Tensor) -> Pool:
    """A pool with the full pages of rows [n, Hkv, D] sealed at 0, 1, .. and the rest in slot 0."""
    pi, n, heads = fmt.page_tokens, *k.shape[:2]
    full = n // pi
    pool = new_pool(fmt, kernels, CPU, max(full, 1), 1, range(heads))
    if full:
        pages = (x[: full * pi].unflatten(0, (full, pi)).transpose(1, 2) for x in (k, v))
        kernels.seal(0, pool, torch.arange(full), torch.arange(full) * pi, *pages)
    for slot, x in ((pool.open_k, k), (pool.open_v, v)):
        slot[0, :, : n % pi] = x[full * pi :].transpose(0, 1)
    return pool


def one_span(start: int, count: int, pages: int) -> Spans:
    """One sequence on pages 0, 1, .."""
    zero = torch.tensor([0])
    return Spans(zero + start, zero + count, zero, torch.arange(max(pages, 1))[None], zero)


def assert_same_bytes(ours: PageKernels, fmt: ReadFormat, heads: int) -> None:
    """Assert that sealed pages equal the definition's: at all scales, for fractions and integers, with zeros of both
    signs."""
    theirs, ids = definition(fmt), torch.tensor([1, 0])
    for scale in (0.0, 2.0**-24, 2.0**-14, 1e-3, 1.0, 300.0, 15000.0, math.inf):
        wide = random_rows(3, 2, 2 * fmt.page_tokens, heads, fmt.head_dim)
        wide = wide.round() if scale in (300.0, 2.0**-24) else wide
        wide = (wide * (65504.0 if scale == math.inf else scale)).clamp(-65504, 65504)
        wide[:, :, :, 16:32] = torch.where(wide[:, :, :, 16:32] > 0, 0.0, -0.0)
        wide[:, 5], wide[:, 7, :, :2] = 0.0, 65504.0
        both = [each.export(filled(each, fmt, *wide.half()), ids) for each in (ours, theirs)]
        assert list(both[0]) == list(both[1]) == [plane.name for plane in fmt.planes]
        for name, plane in both[1].items():
            assert torch.equal(both[0][name].view(torch.uint8), plane.view(torch.uint8)), (name, scale)
