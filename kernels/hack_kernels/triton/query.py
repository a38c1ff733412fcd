"""Q in 8 bits, by the arithmetic of `reference.eq4.quantize_query`, in the two shapes that products take.

Decode has a KV head's query heads as columns, 32 channels at a time, and keeps them in registers for all pages. Prefill
has rows (token, query head) against a whole partition. Q is divided by sqrt(D) before it is quantized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.quantize import divided, extremes

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def query_scale(span, ASYMMETRIC: tl.constexpr):
    """Scale FP32 of partitions of Q whose values lie `span` apart; in the symmetric form, up to `span` from 0."""
    scale = divided(span, 255.0 if ASYMMETRIC else 127.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def query_levels(x, scale, ASYMMETRIC: tl.constexpr):
    """Codes of Q, whole numbers in FP32 that INT8 holds; x and `scale` have one shape.

    In the asymmetric form x is Q less its minimum, and codes 0..255 are returned less 128.
    """
    if ASYMMETRIC:
        levels = tl.minimum(tl.floor(tl.div_rn(x, scale) + 0.5), 255.0) - 128.0
    else:
        levels = tl.minimum(tl.maximum(tl.floor(tl.div_rn(x, scale) + 0.5), -127.0), 127.0)
    return levels


@triton.jit
def load_query(q, first, heads, D: tl.constexpr, N: tl.constexpr):
    """Channels `first`.. `first`+31 of query heads [heads, D]: FP32 [32, N], zero past `heads` and D."""
    channel, head = first + tl.arange(0, 32)[:, None], tl.arange(0, N)[None, :]
    seen = head < heads
    if D % 32 != 0:
        seen = seen & (channel < D)
    return tl.load(q + head * D + channel, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def column_partition(q, p: tl.constexpr, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """One partition of `query_columns`."""
    D: tl.constexpr = LAYOUT.head_dim
    Z: tl.constexpr = LAYOUT.partition
    low = tl.full((N,), float("inf"), tl.float32)
    high = tl.full((N,), float("-inf"), tl.float32)
    for step in tl.static_range((Z + 31) // 32):
        x = divided(load_query(q, p * Z + step * 32, heads, D, N), LAYOUT.root)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    scale = query_scale(high - low if LAYOUT.asymmetric else tl.maximum(high, -low), LAYOUT.asymmetric)
    codes = ()
    sums = tl.zeros((N,), tl.int32)
    for step in tl.static_range((Z + 31) // 32):
        x = divided(load_query(q, p * Z + step * 32, heads, D, N), LAYOUT.root)
        divisor = tl.broadcast_to(scale[None, :], (32, N))
        levels = query_levels(x - low[None, :] if LAYOUT.asymmetric else x, divisor, LAYOUT.asymmetric)
        sums += tl.sum(levels, 0).to(tl.int32)
        codes = codes + (tl.broadcast_to(levels.to(tl.int8)[None, :, :], (W, 32, N)),)
    minimum = (low + 128.0 * scale) * LOG2_E
    scale = scale * LOG2_E
    constant = scale * sums.to(tl.float32)
    if LAYOUT.asymmetric:
        constant += Z * minimum
    return codes, scale, minimum, constant, sums


@triton.jit
def query_columns(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """Query heads at `q` for decode: a tuple over partitions.

    A partition has codes (a tuple over 32 channels of int8 [W, 32, N]), and [N] each the scale, the minimum, the factor
    of K's minimum, and the sum of codes, INT32. Scores are in units of log2.
    """
    query = ()
    for p in tl.static_range(tl.constexpr(LAYOUT.groups)):
        query = query + (column_partition(q, p, LAYOUT, heads, W, N),)
    return query


@triton.jit
def row_partition(q, seen, ASYMMETRIC: tl.constexpr):
    """One partition of `query_rows`, from Q over sqrt(D) [M, Z] FP32. Elements not `seen` get code 0, which adds
    nothing to a product.

    Zeros are added to the divisor to make it a separate value. The loop over pages then broadcasts the scale anew and
    does not keep this tensor.
    """
    if ASYMMETRIC:
        low, high = extremes(q, seen)
        scale = query_scale(high - low, True)
        levels = query_levels(q - low[:, None], scale[:, None] + tl.zeros_like(q), True)
        minimum = low + 128.0 * scale
    else:
        scale = query_scale(tl.max(tl.abs(q), axis=1), False)
        levels = query_levels(q, scale[:, None] + tl.zeros_like(q), False)
        minimum = tl.zeros_like(scale)
    levels = tl.where(seen, levels, 0.0)
    return levels.to(tl.int8), scale, minimum, tl.sum(levels, axis=1)


@triton.jit
def query_rows(q_rows, seen_rows, LAYOUT: tl.constexpr):
    """Rows of Q at `q_rows` [M] for prefill: a tuple over partitions.

    A partition has codes int8 [M, Z], and FP32 [M] each the scale, the minimum (0 in the symmetric form, else the value
    of code 0) and the sum of codes.
    """
    GROUPS: tl.constexpr = LAYOUT.groups
    z = tl.arange(0, LAYOUT.partition_pad)
    inside = (z < LAYOUT.partition)[None, :]
    query = ()
    for p in tl.static_range(GROUPS):
        x = tl.load(q_rows[:, None] + (p * LAYOUT.partition + z)[None, :], mask=seen_rows[:, None] & inside, other=0.0)
        query = query + (row_partition(divided(x.to(tl.float32), LAYOUT.root), inside, LAYOUT.asymmetric),)
    return query
