"""Scales of rows of levels in a record: FP16, or bytes that are the upper bits of FP16 (`level_format.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.level_format import BYTE_SHIFT, LEAST_BYTE, MOST_BYTE
from hack_kernels.triton.tiles import scale_and_minimum, unit_place

SHIFT = tl.constexpr(BYTE_SHIFT)
BELOW_HALF = tl.constexpr(2 ** (BYTE_SHIFT - 1) - 1)
LEAST = tl.constexpr(LEAST_BYTE)
MOST = tl.constexpr(MOST_BYTE)


@triton.jit
def half_of_byte(byte):
    """FP16 of bytes in any integer type. Only the lowest eight bits count."""
    return ((byte & 0xFF) << SHIFT).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def byte_of_half(half):
    """Positive FP16 to the nearest byte, ties to the even one: INT32."""
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.minimum(tl.maximum((bits + BELOW_HALF + ((bits >> SHIFT) & 1)) >> SHIFT, LEAST), MOST)


@triton.jit
def scale_pointer(scales, NARROW: tl.constexpr):
    """Bytes of a record to elements of a scale's type."""
    return scales if NARROW else scales.to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def load_row_scales(scales, token, NARROW: tl.constexpr):
    """Scales FP32 of tokens; `scales` points to bytes."""
    found = tl.load(scale_pointer(scales, NARROW) + unit_place(token, 0))
    half = half_of_byte(found.to(tl.int32)) if NARROW else found
    return half.to(tl.float32)


@triton.jit
def store_row_scales(scales, token, half, NARROW: tl.constexpr):
    """FP16 scales of tokens, as `stored` makes them; `scales` points to bytes."""
    found = (half.to(tl.int16, bitcast=True) >> SHIFT).to(tl.uint8) if NARROW else half
    tl.store(scale_pointer(scales, NARROW) + unit_place(token, 0), found)


@triton.jit
def load_scale_units(scales, UNITS: tl.constexpr, W: tl.constexpr, NARROW: tl.constexpr):
    """Scales of all units of W pages, which begin at `scales` [W] uint8: a tuple over units of FP32 [W, 16]."""
    pairs = scales.to(tl.pointer_type(tl.int16 if NARROW else tl.int32), bitcast=True)
    found = ()
    for pair in tl.static_range(UNITS // 2):
        place = pair * 16 + tl.arange(0, 8)[:, None] * 2 + tl.arange(0, 2)[None, :]
        words = tl.load(pairs[:, None, None] + place[None, :, :])
        for unit in tl.static_range(2):
            word = tl.split(words)[unit]
            if NARROW:
                low, high = half_of_byte(word).to(tl.float32), half_of_byte(word >> 8).to(tl.float32)
            else:
                low, high = scale_and_minimum(word)
            found = found + (tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (W, 16)),)
    return found
