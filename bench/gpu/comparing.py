"""Helpers of the checks: pools that hold rubbish, pages dequantized by their definition, and errors."""

from __future__ import annotations

import torch
from hack_kernels.base import PageFormat, Planes, Pool, Spans
from hack_kernels.hack_format import HackFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.pools import new_pool
from hack_kernels.quantize import unpack
from hack_kernels.reference.levels import dequantize, unpack_codes, unpack_scales
from hack_kernels.reference.reading import ReadingReference
from hack_kernels.row_format import RowFormat
from hack_kernels.triton.backend import TritonBackend
from torch import Tensor

from bench.gpu.shapes import definition_of, kernels_of

CPU = torch.device("cpu")

TOLERANCE = 2.0**-7
"""Relative error, one step of BF16: Triton's interpreter truncates where torch rounds, and a GPU's exp changes weights
that are near a rounding tie. A wrong page, field or scale is off by far more."""


def poisoned_pool(backend: TritonBackend, fmt: PageFormat, pages: int, heads: int, slots: int = 1) -> Pool:
    """A pool whose bytes are all 0xFF."""
    pool = new_pool(fmt, kernels_of(backend, fmt), backend.device, pages, slots, range(heads))
    records = next(iter(pool.planes.values())).untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=backend.device).set_(records).fill_(0xFF)
    return pool


def poison(like: Tensor, device: torch.device) -> None:
    """Fill with NaN the memory from which the allocator will take the next tensor of this size."""
    torch.full_like(like, float("nan"), device=device)


def reconstructed(fmt: PageFormat, wire: Planes) -> tuple[Tensor, Tensor]:
    """K^ and V^ FP64 [P, Hkv, Π, D] from planes in wire order."""
    if isinstance(fmt, RowFormat):
        return wire["k"].transpose(0, 1).double(), wire["v"].transpose(0, 1).double()
    if isinstance(fmt, LevelFormat):
        k, v = (
            dequantize(bits, unpack_codes(x, bits, wire), unpack_scales(wire[f"{x}_scale"], fmt.scales), torch.float64)
            for x, bits in (("k", fmt.k_bits), ("v", fmt.v_bits))
        )
        return k.transpose(0, 1), v.transpose(0, 1)
    if not isinstance(fmt, HackFormat):
        found = {name: plane.transpose(0, 1) for name, plane in wire.items()}
        reference = definition_of(fmt)
        assert isinstance(reference, ReadingReference)
        k, v = (
            reference.dequantize(x, {name: plane for name, plane in found.items() if name.split("_")[0] == x}).double()
            for x in "kv"
        )
        return k, v
    planes = {name: plane.transpose(0, 1).double() for name, plane in wire.items() if "codes" not in name}
    k, v = (unpack(wire[f"{x}_codes"].transpose(0, 1), bits, axis).double() for x, bits, axis in (
        ("k", fmt.k_bits, -2), ("v", fmt.v_bits, -1)
    ))  # fmt: skip
    k_scale, k_min = (planes[x].repeat_interleave(fmt.k_partition, -1) for x in ("k_scale", "k_min"))
    return k * k_scale + k_min, (v * planes["v_scale"][..., None] + planes["v_min"][..., None]).transpose(-1, -2)


def moved(planes: Planes, device: torch.device) -> Planes:
    return {name: plane.to(device) for name, plane in planes.items()}


def spans_on(x: Spans, device: torch.device) -> Spans:
    return Spans(*(t.to(device) for t in (x.starts, x.counts, x.offsets, x.table, x.slots)))


def same(got: Planes, expected: Planes, what: str) -> None:
    for name, plane in expected.items():
        differing = int((got[name].cpu() != plane).sum())
        if differing:
            raise AssertionError(f"{what}: {differing} of {plane.numel()} elements of {name} differ")


def close(got: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    error = float((got.cpu().float() - expected.float()).norm() / expected.float().norm())
    if not error <= tolerance:  # so NaN fails too
        raise AssertionError(f"{what}: relative error {error:.2e}")
