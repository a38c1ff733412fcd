"""The definition of pages of small floating-point numbers; `float_format.py` says what the planes mean."""

from __future__ import annotations

import torch
from torch import Tensor

from hack_kernels.base import Planes
from hack_kernels.float_format import Element, FloatFormat, Scaling
from hack_kernels.read_format import pack_codes, unpack_codes
from hack_kernels.reference.reading import ALL_HEADS, ReadingReference


class FloatReference(ReadingReference):
    """Implements `PageKernels` for `FloatFormat`."""

    def __init__(self, fmt: FloatFormat, device: torch.device) -> None:
        super().__init__(fmt, device)
        self.fmt = fmt

    def quantize(self, name: str, rows: Tensor, heads: slice = ALL_HEADS) -> Planes:
        """Codes of rows divided by their scales."""
        fmt, blocks = self.fmt, rows.float().unflatten(-1, (-1, self.fmt.block))
        scales, steps = scales_of(fmt, name, blocks)
        return pack_codes(name, encode(fmt.element, blocks / steps).flatten(-2), fmt.element.bits) | scales

    def dequantize(self, name: str, planes: Planes, heads: slice = ALL_HEADS) -> Tensor:
        """Values times scales."""
        fmt = self.fmt
        values = decode(fmt.element, unpack_codes(name, planes, fmt.element.bits))
        scaled: Tensor = values.unflatten(-1, (-1, fmt.block)) * steps_of(fmt, name, planes)
        return scaled.flatten(-2)


def scales_of(fmt: FloatFormat, name: str, blocks: Tensor) -> tuple[Planes, Tensor]:
    """Blocks [..., Π, D/block, block] FP32 -> their planes of scales, and each block's divisor."""
    largest, scale, gain = blocks.abs().amax(-1), f"{name}_scale", f"{name}_gain"
    whole = largest.amax((-2, -1))[..., None]
    if fmt.scaling is Scaling.PAGE:
        step = whole / fmt.element.largest
        # If the division rounded down, the largest value would lie beyond the element's largest.
        step = torch.where(step * fmt.element.largest < whole, step.nextafter(torch.full_like(step, torch.inf)), step)
        planes = {scale: torch.where(step == 0, torch.ones_like(step), step)}
        return planes, steps_of(fmt, name, planes)
    if fmt.scaling is Scaling.POWER:
        # frexp's mantissa is below 1, so its exponent is one above a float's. A block of zeros gets the least byte.
        exponent = torch.frexp(largest).exponent - 1 - int(torch.tensor(fmt.element.largest).log2())
        planes = {scale: torch.where(largest == 0, 0, (exponent + 127).clamp(0, 254)).to(torch.uint8)}
        return planes, steps_of(fmt, name, planes)
    whole = whole / (Element.E4M3.largest * fmt.element.largest)
    whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    planes = {scale: encode(Element.E4M3, largest / (fmt.element.largest * whole[..., None])), gain: whole}
    steps = steps_of(fmt, name, planes)
    return planes, torch.where(steps == 0, torch.inf, steps)


def steps_of(fmt: FloatFormat, name: str, planes: Planes) -> Tensor:
    """The scales of a page's blocks, [..., Π or 1, D/block, 1] FP32."""
    scale = planes[f"{name}_scale"]
    if fmt.scaling is Scaling.PAGE:
        return scale[..., None, None]
    if fmt.scaling is Scaling.POWER:
        bits = scale.to(torch.int32) << 23
        return torch.where(bits == 0, 0x00400000, bits).view(torch.float32)[..., None]
    return decode(Element.E4M3, scale)[..., None] * planes[f"{name}_gain"][..., None, None]


def encode(element: Element, x: Tensor) -> Tensor:
    """Codes, uint8, of finite x: to nearest, ties to the even code, saturating."""
    sizes = element.sizes_on(x.device)[: element.finite]
    between = (sizes[1:] + sizes[:-1]) / 2  # exact
    # A size between two values ties if it has one rank from below and another from above.
    size = x.abs().contiguous()
    below, above = (torch.searchsorted(between, size, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above)
    return (codes | (torch.signbit(x).long() << (element.bits - 1))).to(torch.uint8)


def decode(element: Element, codes: Tensor) -> Tensor:
    """The values of codes, FP32."""
    sizes = element.sizes_on(codes.device)
    return torch.cat((sizes, -sizes))[codes.long()]
