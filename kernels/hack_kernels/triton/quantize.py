"""The arithmetic of `hack_kernels.quantize`, for use inside Triton kernels.

Codes must equal the reference's bit for bit on a GPU too, but Triton's plain division is good to 2 ulp only. So a
quotient by a scale that many elements share is computed from the scale's reciprocal and corrected: the result of
`div_rn` at half the price. Kernels that use this file switch off the fusion of multiplications into additions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quotient(x, y, reciprocal):
    """x / y in FP32, correctly rounded; `reciprocal` is 1/y correctly rounded.

    Two steps of Markstein's correction: the first estimate is off by at most 2 ulp, the second faithful. Nothing here
    over- or underflows, as x and y are differences of FP16 numbers and their fractions.
    """
    estimate = x * reciprocal
    estimate = tl.fma(tl.fma(-estimate, y, x), reciprocal, estimate)
    return tl.fma(tl.fma(-estimate, y, x), reciprocal, estimate)


@triton.jit
def divided(x, y: tl.constexpr):
    """x / y in FP32 for a constant y, correctly rounded."""
    return tl.div_rn(x, tl.full(x.shape, y, tl.float32))


@triton.jit
def scale_of(low, high, LEVELS: tl.constexpr):
    """Scale of partitions with FP32 extremes: the smallest FP16 not below (high - low) / LEVELS, 1 where that is 0."""
    exact = divided(high - low, LEVELS)
    half = exact.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)  # not negative: the next FP16 above is the next bit pattern
    rounded = tl.where(half.to(tl.float32) < exact, bits + 1, bits).to(tl.int16)
    return tl.where(rounded == 0, 0x3C00, rounded).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def codes_of(x, low, scale, noise, LEVELS: tl.constexpr):
    """Codes INT32 of FP32 rows [R, C]; `low` and `scale` are FP32 [R], `noise` in (0, 1) [R, C]."""
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    steps = quotient(x - low[:, None], scale[:, None], reciprocal[:, None]) + noise
    return tl.minimum(steps, LEVELS).to(tl.int32)  # steps are not negative: truncation rounds down


@triton.jit
def noise_of(seed, layer, head, positions, blocks, PLANE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The numbers that are added before rounding down, [T, 8B]: 1/2, or those of philox.py for rows at `positions` [T]
    and the channels 8b .. 8b+7 of each of `blocks` [B]. PLANE is 0 for K and 1 for V."""
    T: tl.constexpr = positions.shape[0]
    CHANNELS: tl.constexpr = 8 * blocks.shape[0]
    if STOCHASTIC:
        COUNT: tl.constexpr = blocks.shape[0]
        zero = tl.zeros((T, COUNT), tl.uint32)
        rows, numbers = positions.to(tl.uint32)[:, None], (2 * blocks + PLANE).to(tl.uint32)[None, :]
        a, b, c, d = tl.philox(seed, zero + layer.to(tl.uint32), zero + head.to(tl.uint32), zero + rows, zero + numbers)
        words = tl.join(tl.join(a, c), tl.join(b, d))  # [T, B, 2, 2]: a, b, c, d
        halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (T, CHANNELS))
        noise = (halves.to(tl.float32) + 0.5) * (1.0 / 65536.0)
    else:
        noise = tl.full((T, CHANNELS), 0.5, tl.float32)
    return noise


@triton.jit
def extremes(x, seen):
    """Minimum and maximum of every row, of the elements that `seen` marks."""
    return tl.min(tl.where(seen, x, float("inf")), axis=1), tl.max(tl.where(seen, x, float("-inf")), axis=1)
