"""The common part of page formats whose kernels read values one by one: how codes are packed, how to multiply.

Codes of K and of V, [Π, D], are packed along rows: byte (r, d) of a plane holds rows f·r .. f·r + f - 1 of channel d,
f = 8 / bits, the first in the lowest bits. Codes of 3, 5 and 6 bits have a plane of the lower 2 or 4 bits and a plane
`high` of the bits above. Pages rest in wire order.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hack_kernels.base import PageFormat, Plane, Planes
from hack_kernels.quantize import pack, unpack

LOW_BITS: Final = {3: 2, 5: 4, 6: 4}
"""Width -> bits in the first plane, where there are two."""


class ReadFormat(PageFormat):
    """A format of codes that become numbers where they are read."""

    fused: bool = True
    """Whether attention converts codes in registers. Else pages first become FP16 rows in memory, as in the papers."""


def packed_planes(name: str, bits: int, page_tokens: int, head_dim: int, suffix: str = "") -> tuple[Plane, ...]:
    """The planes of codes of `bits` bits: `name` + `suffix`, and `name_high` for widths that do not divide a byte."""
    low = LOW_BITS.get(bits, bits)
    planes = (Plane(name + suffix, torch.uint8, (page_tokens * low // 8, head_dim)),)
    if low == bits:
        return planes
    return (*planes, Plane(f"{name}_high", torch.uint8, (page_tokens * (bits - low) // 8, head_dim)))


def pack_codes(name: str, codes: Tensor, bits: int, suffix: str = "") -> Planes:
    """Codes uint8 [..., Π, D] -> the planes of `packed_planes`."""
    low = LOW_BITS.get(bits, bits)
    packed = {name + suffix: pack(codes & (2**low - 1), low, -2)}
    if low != bits:
        packed[f"{name}_high"] = pack(codes >> low, bits - low, -2)
    return packed


def unpack_codes(name: str, planes: Planes, bits: int, suffix: str = "") -> Tensor:
    """Inverse of `pack_codes`."""
    low = LOW_BITS.get(bits, bits)
    codes = unpack(planes[name + suffix], low, -2)
    return codes if low == bits else codes | (unpack(planes[f"{name}_high"], bits - low, -2) << low)
