"""A sequence's exact rows: its own page and the pages that a window keeps, FP16, as the open-page rule sees them.

Products of FP16 and FP32 run on FP16 matrix units: the FP32 side is the sum of two FP16 numbers, 22 bits of mantissa.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hack_kernels.triton.query import LOG2_E, load_query

HALF_STEP = tl.constexpr(2048.0)
"""2^11: brings the rest of an FP32 number in -1..1, after rounding to FP16, back to the range of the number."""


@triton.jit
def two_halves(x):
    """x in -1..1 as FP16 numbers (high, low) with x = high + low / 2^11 to 22 bits."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * HALF_STEP).to(tl.float16)


@triton.jit
def load_rows(rows, row, first, columns: tl.constexpr, D: tl.constexpr):
    """Rows `row` [W, 16] of FP16 [Π, D], channels `first`.. of them: [W, 16, columns], zero past D."""
    channel = first + tl.arange(0, columns)
    place = rows + row[:, :, None] * D + channel[None, None, :]
    if D % columns == 0:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=(row >= 0)[:, :, None] & (channel < D)[None, None, :], other=0.0)
    return x


@triton.jit
def exact_scores(q, heads, rows, row, origin, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Scores FP32 [W, 16, N] of rows `row` [W, 16] of K against the query heads at `q`, in units of log2.

    `origin` is 0, but the compiler does not know it (`own_page`).
    """
    size = tl.zeros((N,), tl.float32)
    for first in range(origin, D, 32):
        size = tl.maximum(size, tl.max(tl.abs(load_query(q, first, heads, D, N)), 0))
    size = tl.where(size == 0.0, 1.0, size)
    large = tl.zeros((W, 16, N), tl.float32)
    small = tl.zeros((W, 16, N), tl.float32)
    for first in range(origin, D, 32):
        high, low = two_halves(load_query(q, first, heads, D, N) / size[None, :])
        k = load_rows(rows, row, first, 32, D)
        large = tl.dot(k, tl.broadcast_to(high[None, :, :], (W, 32, N)), large)
        small = tl.dot(k, tl.broadcast_to(low[None, :, :], (W, 32, N)), small)
    return (large + small / HALF_STEP) * (size * (LOG2_E * D**-0.5))[None, None, :]


@triton.jit
def add_rows(state, scores, rows, row, seen, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Rows `row` of V that are `seen`, with `scores` [W, 16, N], added to the running softmax of `decode.add_pages`."""
    top, weight, out = state
    scores = tl.where(seen[:, :, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    kept = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None, :])
    weight = weight * kept[:, None, :] + tl.sum(weights, 1)[:, None, :]
    high, low = two_halves(weights)
    added = ()
    for m in tl.static_range(D // 16):
        v = tl.permute(load_rows(rows, row, m * 16, 16, D), (0, 2, 1))
        small = tl.dot(v, low)
        added = added + (tl.dot(v, high, out[m] * kept[:, None, :]) + small / HALF_STEP,)
    return new_top, weight, added


@triton.jit
def place_of(page, WINDOW: tl.constexpr):
    """`Window.place`."""
    return tl.where(page < WINDOW.sink, page, WINDOW.sink + (page - WINDOW.sink) % (WINDOW.recent + 1))


@triton.jit
def own_page(
    state,
    q,
    exact,
    start,
    first,
    past,
    heads,
    D: tl.constexpr,
    PI: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Exact rows up to position `start` added to the running softmax, 16·W rows at a time: pages `first` to `past` of
    the slot, in its order. A slot has the open page and the pages before it that `WINDOW` keeps. `exact`: where K and V
    of the slot begin.

    Past the last row, the last row is read again. So offsets of lanes depend on the sequence, and LLVM cannot compute
    them before the loop over sequences and keep them in registers through the loop over pages. `origin` is 0, but LLVM
    does not know it: it would unroll the loop over channels, which would take more registers than the pages do.
    """
    own_rows, origin = start % PI + 1, 32 * tl.minimum(start, 0)
    rows = own_rows
    if WINDOW.pages > 1:
        page = start // PI
        own, full = place_of(page, WINDOW) * PI, tl.where(page < WINDOW.pages, page, WINDOW.pages - 1) * PI
        rows = tl.minimum(tl.where(page < WINDOW.pages, full + own_rows, full + PI), past * PI)
    for begin in range(first * PI, rows, 16 * W):
        row = begin + tl.arange(0, W)[:, None] * 16 + tl.arange(0, 16)[None, :]
        if WINDOW.pages == 1:
            seen = row < own_rows
            row = tl.minimum(row, own_rows - 1)
        else:
            seen = (row < rows) & ((row < own) | (row >= own + PI) | (row < own + own_rows))
            row = tl.where(seen, row, own)
        scores = exact_scores(q, heads, exact[0], row, origin, D, W, N)
        state = add_rows(state, scores, exact[1], row, seen, D, W, N)
    return state
