"""The definition of pages of integer codes in groups; `group_format.py` says what the planes mean."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.quantize import quantize
from hack_kernels.read_format import pack_codes, unpack_codes
from hack_kernels.reference.reading import ALL_HEADS, ReadingReference


class GroupReference(ReadingReference):
    """Implements `PageKernels` for `GroupFormat`."""

    def __init__(self, fmt: GroupFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Quantize group by group."""
        side = self.fmt.side(name)
        if side.centre:
            return centred_planes(name, side, rows, rows.float().abs().amax(-1, keepdim=True))
        made = quantize(_grouped(side, rows), side.bits)
        planes = {f"{name}_scale": made.scale, f"{name}_min": made.minimum}
        return pack_codes(name, _ungrouped(side, made.codes), side.bits, "_codes") | planes

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """Rows: s·c + m, or a·(c - C) / C of centred codes."""
        side = self.fmt.side(name)
        codes, scale = unpack_codes(name, planes, side.bits, "_codes").float(), planes[f"{name}_scale"].float()
        if side.centre:
            return (codes - side.centre) / side.centre * scale
        grouped = _grouped(side, codes) * scale[..., None] + planes[f"{name}_min"].float()[..., None]
        return _ungrouped(side, grouped)


def centred_planes(name: str, side: Grouping, rows: Tensor, largest: Tensor) -> Planes:
    """Codes around zero of rows [..., Π, D], with the scales `largest` [..., Π, 1] FP32, 1 in place of 0."""
    scale = torch.where(largest == 0, torch.ones_like(largest), largest)
    codes = (torch.round(rows.float() * side.centre / scale) + side.centre).to(torch.uint8)
    return pack_codes(name, codes, side.bits, "_codes") | {f"{name}_scale": scale.half()}


def _grouped(side: Grouping, x: Tensor) -> Tensor:
    """[..., Π, D] -> the values of each group last: [..., Π/G, D, G] or [..., Π, D/G, G]."""
    if side.by_channel:
        return _split(x, -2, side.group).transpose(-1, -2)
    return _split(x, -1, side.group)


def _split(x: Tensor, axis: int, size: int) -> Tensor:
    parts: Tensor = x.unflatten(axis, (-1, size))
    return parts


def _ungrouped(side: Grouping, x: Tensor) -> Tensor:
    """Inverse of `_grouped`."""
    return x.transpose(-1, -2).flatten(-3, -2) if side.by_channel else x.flatten(-2)
