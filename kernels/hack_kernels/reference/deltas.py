"""The definition of pages of deltas against anchor rows; `delta_format.py` says what the planes mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.delta_format import ANCHOR_CENTRE, DeltaFormat
from hack_kernels.quantize import fp16_up
from hack_kernels.read_format import LOW_BITS, pack_codes, unpack_codes
from hack_kernels.reference.reading import ALL_HEADS, ReadingReference


class DeltaReference(ReadingReference):
    """Implements `PageKernels` for `DeltaFormat`."""

    def __init__(self, fmt: DeltaFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self._anchors, self._others = fmt.anchors.to(device), fmt.others.to(device)
        self._place = torch.cat((fmt.anchors, fmt.others)).argsort().to(device)
        """[Π] int64: the place of each row in the list of anchors followed by the other rows."""

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Anchors are quantized first: deltas are taken from the anchors as they will be read."""
        bits, centre = self.fmt.side(name).bits, self.fmt.side(name).centre
        x = rows.float()
        anchors = x[..., self._anchors, :]
        largest = _or_one(anchors.abs().amax(-1, keepdim=True))
        of_anchors = torch.round(anchors * ANCHOR_CENTRE / largest) + ANCHOR_CENTRE
        delta = x[..., self._others, :] - self._leaning(_read(of_anchors, ANCHOR_CENTRE, largest))
        half = _or_one(fp16_up(delta.abs().amax(-1, keepdim=True) / 2).float())
        codes = (torch.round(delta * centre / (half * 2)) + centre).to(torch.uint8)
        scale = torch.cat((largest, half), -2)[..., self._place, :].half()
        packed = pack_codes(name, F.pad(codes, (0, 0, 0, -codes.shape[-2] % 8)), bits, "_codes")
        held = {plane.name: plane.shape[0] for plane in self.fmt.planes}
        planes = {each: packed[each][..., : held[each], :].contiguous() for each in packed}
        return {f"{name}_anchor": of_anchors.to(torch.uint8), **planes, f"{name}_scale": scale}

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """Rows: an anchor, or a delta plus the anchor of its group."""
        centre = self.fmt.side(name).centre
        scale = planes[f"{name}_scale"].float()
        anchors = _read(planes[f"{name}_anchor"].float(), ANCHOR_CENTRE, scale[..., self._anchors, :])
        codes = self.unpacked(name, planes).float()
        others = self._leaning(anchors) + _read(codes, centre, scale[..., self._others, :] * 2)
        return torch.cat((anchors, others), -2)[..., self._place, :]

    def unpacked(self, name: str, planes: Planes) -> Tensor:
        """Codes of deltas uint8 [..., N, D]. Planes end with the last row, so they are padded to whole bytes first."""
        bits = self.fmt.side(name).bits
        count, low = len(self._others), LOW_BITS.get(bits, bits)
        whole = -(-count // 8)
        rows = {f"{name}_codes": whole * low, f"{name}_high": whole}
        padded = {n: F.pad(planes[n], (0, 0, 0, rows[n] - planes[n].shape[-2])) for n in rows if n in planes}
        return unpack_codes(name, padded, bits, "_codes")[..., :count, :]

    def _leaning(self, anchors: Tensor) -> Tensor:
        """[..., A, D] -> [..., N, D]: the anchor of each other row."""
        return anchors[..., self._others // self.fmt.group, :]


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _read(codes: Tensor, centre: int, reach: Tensor) -> Tensor:
    return (codes - centre) / centre * reach
