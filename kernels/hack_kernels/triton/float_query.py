"""Pages whose rows a warp reads 16 at a time and multiplies as FP16 or BF16: the query, and the softmax of 16 rows."""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.paged import LOWEST
from hack_kernels.triton.query import LOG2_E
from hack_kernels.triton.tiles import INTERPRETED, doubled, equal_halves

ROWS_AT_ONCE = tl.constexpr(16)
"""Rows that a warp reads in one iteration."""


@triton.jit
def operand_channel(place, first, STEP: tl.constexpr):
    """The channel at a place of a step that begins at channel `first`, where a lane's part of a K row is its operands.
    A place has the bits (product, half, quad, quad, one)."""
    return first + place // 2 % 4 * (STEP // 4) + place // 16 * 4 + place // 8 % 2 * 2 + place % 2


@triton.jit
def plain_channel(place, first, STEP: tl.constexpr):
    """The channel at a place where channels are in their order."""
    return first + place


@triton.jit
def rounded_query(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """The query in the order of `operand_channel`."""
    return query_steps(q, LAYOUT, heads, W, N, operand_channel)


@triton.jit
def plain_query(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr):
    """The query in the order of `plain_channel`."""
    return query_steps(q, LAYOUT, heads, W, N, plain_channel)


@triton.jit
def query_steps(q, LAYOUT: tl.constexpr, heads, W: tl.constexpr, N: tl.constexpr, CHANNEL: tl.constexpr):
    """Query heads in the type of the pages, scaled for scores in log2: a tuple over steps of [W, step, N]."""
    D: tl.constexpr = LAYOUT.head_dim
    STEP: tl.constexpr = LAYOUT.step
    head = tl.arange(0, N)[None, :]
    query = ()
    for c in tl.static_range(D // STEP):
        channel = CHANNEL(tl.arange(0, STEP), c * STEP, STEP)
        x = tl.load(q + head * D + channel[:, None], mask=head < heads, other=0.0).to(tl.float32)
        x = (x * (LOG2_E * D**-0.5)).to(LAYOUT.dtype)
        query = query + (tl.broadcast_to(x[None, :, :], (W, STEP, N)),)
    return query


@triton.jit
def product(a, b, added):
    """a·b + added in FP32. Triton 3.9's interpreter would multiply the bit patterns of BF16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), added)
    return tl.dot(a, b, added)


@triton.jit
def weights_of(top, weight, score, valid, W: tl.constexpr, N: tl.constexpr):
    """The running softmax with scores FP32 [W, 16, N] of 16 rows added: the new top, the factor of what came before,
    the weights FP16 [W, 16, N] of the rows, and the new weight. Pages that are not `valid` [W] do not count."""
    new_top = tl.maximum(top, tl.where(valid[:, None], tl.max(score, 1), LOWEST))
    kept = tl.exp2(top - new_top)
    base = tl.where(valid[:, None], new_top, -LOWEST)  # pages that do not count get weights of 0
    p = tl.exp2(score - base[:, None, :]).to(tl.float16)
    ones = tl.full((W, 16, ROWS_AT_ONCE), 1.0, tl.float32).to(tl.float16)
    return new_top, kept, p, equal_halves(product(ones, p, doubled(weight * kept[:, None, :], W, N)), W, N)
