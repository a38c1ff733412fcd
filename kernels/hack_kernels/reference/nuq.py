"""The definition of pages of non-uniform levels with outliers aside; `nuq_format.py` says what the planes mean."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Planes, Pool
from hack_kernels.check import check_seal
from hack_kernels.nuq_format import NuqFormat, NuqTables, cos_sin_of, normal_poles, rotated, unrotated
from hack_kernels.read_format import pack_codes, unpack_codes
from hack_kernels.reference.reading import ALL_HEADS, ReadingReference


class NuqReference(ReadingReference):
    """Implements `NuqKernels`."""

    def __init__(self, fmt: NuqFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt
        self._tables: NuqTables | None = None
        self._normal = {name: torch.tensor(normal_poles(fmt.side(name).bits), device=device) for name in ("k", "v")}

    def calibrate(self, tables: NuqTables) -> None:
        """Keep the tables."""
        tables.check(self.fmt)
        self._tables = tables.to(self.device)

    @property
    def tables(self) -> NuqTables:
        """The tables of the layer. Raises `ValueError` if there are none."""
        if self._tables is None:
            raise ValueError("a calibrated format without the tables of its layer")
        return self._tables

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize full pages. K of a calibrated format is rotated back first."""
        if self.fmt.calibrated:
            check_seal(self.fmt, pool, page_ids, starts, k, v)
            k = unrotated(k, starts, self.tables.frequencies)
            pool.planes["k_first"][page_ids] = starts[:, None, None].float()
        super().seal(layer, pool, page_ids, starts, k, v)

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Quantize vector by vector. K of a calibrated format must come from `unrotated`."""
        side = self.fmt.side(name)
        x = rows.float().mT if side.by_channel else rows.float()  # [..., N, values]
        planes = dict[str, Tensor]()
        if side.ranged:
            at, span = outliers_and_range(x)
            planes[f"{name}_range"] = span.half()
        else:
            span = self._known_range(heads)
        middle, reach = middles(span)
        if not side.ranged:
            far = (x - middle).abs()
            first = far.argmax(-1, keepdim=True)
            at = torch.cat((first, far.scatter(-1, first, -1.0).argmax(-1, keepdim=True)), -1)
        poles = self.poles(name)
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for bound in (poles[1:] + poles[:-1]) / 2:
            codes += x > middle + reach * bound
        codes = codes.mT if side.by_channel else codes
        planes[f"{name}_at"] = at.mT.to(torch.uint8)
        planes[f"{name}_out"] = x.gather(-1, at).mT.half()
        return pack_codes(name, codes, side.bits, "_codes") | planes

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """pole·r + z, outliers in their places, K rotated again if it was rotated back."""
        side = self.fmt.side(name)
        codes = unpack_codes(name, planes, side.bits, "_codes")
        codes = codes.mT if side.by_channel else codes
        span = planes[f"{name}_range"].float() if side.ranged else self._known_range(heads)
        middle, reach = middles(span)
        x = self.poles(name)[codes.long()] * reach + middle
        at = planes[f"{name}_at"].long().clamp(max=x.shape[-1] - 1)  # a page from a wire may name any place
        x = x.scatter(-1, at.mT, planes[f"{name}_out"].float().mT)
        x = x.mT if side.by_channel else x
        if side.ranged:
            return x
        rows = planes[f"{name}_first"] + torch.arange(x.shape[-2], device=x.device)
        return rotated(x, *cos_sin_of(rows, self.tables.frequencies))

    def poles(self, name: str) -> Tensor:
        """The poles of K or V, float32 on the device."""
        if self.fmt.calibrated:
            return self.tables.k_poles if name == "k" else self.tables.v_poles
        return self._normal[name]

    def _known_range(self, heads: slice) -> Tensor:
        """[heads, 2, D]"""
        return self.tables.k_range[:, heads].transpose(0, 1)


def outliers_and_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the least and the largest value in vectors x [..., N, values], [..., N, 2] int64, and lo and hi of
    the other values, [..., 2, N]."""
    at = torch.stack((x.argmin(-1), x.argmax(-1)), -1)
    aside = torch.zeros_like(x, dtype=torch.bool).scatter(-1, at, torch.ones_like(at, dtype=torch.bool))
    rest = (x.masked_fill(aside, torch.inf).amin(-1), x.masked_fill(aside, -torch.inf).amax(-1))
    return at, torch.stack(rest, -2) + 0.0  # no -0


def middles(span: Tensor) -> tuple[Tensor, Tensor]:
    """z and r [..., N, 1] of lo and hi [..., 2, N]."""
    low, high = span[..., 0, :, None], span[..., 1, :, None]
    return (high + low) / 2, (high - low) / 2
