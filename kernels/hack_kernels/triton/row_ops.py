"""A model's operations on rows, one launch each: between two products a decode step spends its time on launches.

Arithmetic is FP32, and a row's result does not depend on the rows beside it. The number of rows appears only in the
grid, so no batch size makes Triton compile.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.base import Pool, Spans
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.tiles import BEYOND_HALF, rounded

LANE_ELEMENTS: Final = 8
"""Elements that a lane takes at once: 16 bytes of 16-bit values."""
WARP: Final = 32
MOST_WARPS: Final = 16
COLUMNS_AT_ONCE: Final = 1024
"""Outputs of `gate` in a program: few, so that a row alone occupies many multiprocessors."""
HEADS_AT_ONCE: Final = 4
"""Heads that a program of `rotate` turns."""


@triton.jit
def norm_kernel(x, more, weight, out, epsilon, N: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr):
    """Grid (rows,). x, more and out [rows, N], weight [N], contiguous. All loads precede the sum, so none waits for
    it."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < N
    at = tl.program_id(0).to(tl.int64) * N + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        added = rounded(value, DTYPE)
        tl.store(x + at, added, mask=inside)
        value = added.to(tl.float32)
    size = tl.rsqrt(tl.sum(value * value, 0) / N + epsilon)
    tl.store(out + at, rounded(value * size * factor, DTYPE), mask=inside)


@triton.jit
def rotate_kernel(
    x, cos_sin, row_stride, ROTATED: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr
):
    """Grid (rows, blocks of HEADS heads). x [rows, ROTATED or more, D] with `row_stride` between rows; cos_sin
    [rows, D], contiguous."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < D // 2
    seen = (head < ROTATED) & inside
    at = x + row * row_stride + head * D + pair
    low = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(at + D // 2, mask=seen, other=0.0).to(tl.float32)
    turn = cos_sin + row * D + pair
    cos = tl.load(turn, mask=inside, other=0.0)
    sin = tl.load(turn + D // 2, mask=inside, other=0.0)
    tl.store(at, rounded(low * cos - high * sin, DTYPE), mask=seen)
    tl.store(at + D // 2, rounded(high * cos + low * sin, DTYPE), mask=seen)


@triton.jit
def gate_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of BLOCK columns). x [rows, 2N] and out [rows, N], contiguous."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    g = tl.load(x + row * (2 * N) + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + row * (2 * N) + N + column, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(-tl.abs(g))  # at most 1, so that nothing overflows
    active = g * tl.where(g < 0, power, 1.0) / (1.0 + power)
    tl.store(out + row * N + column, rounded(active * u, DTYPE), mask=inside)


@triton.jit
def narrowed(x, inside):
    """Values at `x` in FP16, 0 where FP16 does not hold them, and whether it holds them."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    held = tl.abs(value) < BEYOND_HALF  # false for NaN, too
    return tl.where(held, value, 0.0).to(tl.float16), held


@triton.jit
def append_kernel(
    k,
    v,
    open_k,
    open_v,
    starts,
    slots,
    faulty,
    k_stride,
    v_stride,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PI: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (sequences,). k and v [sequences, HEADS, D] with strides between rows; open_k and open_v [slots, HEADS,
    rows of a slot, D] with `slot_stride` and `head_stride`."""
    b = tl.program_id(0)
    number, slot = tl.load(starts + b), tl.load(slots + b)
    element = tl.arange(0, BLOCK)
    inside = element < HEADS * D
    k_row, k_held = narrowed(k + b.to(tl.int64) * k_stride + element, inside)
    v_row, v_held = narrowed(v + b.to(tl.int64) * v_stride + element, inside)
    held = tl.min((k_held & v_held).to(tl.int32), 0)
    page = number // PI  # as in `Window.at`
    place = tl.where(page < SINK, page, SINK + (page - SINK) % (RECENT + 1)) * PI + number % PI
    at = slot * slot_stride + (element // D).to(tl.int64) * head_stride + place * D + element % D
    tl.store(open_k + at, k_row, mask=element < held * (HEADS * D))
    tl.store(open_v + at, v_row, mask=element < held * (HEADS * D))
    if held == 0:  # a flag that is set stays set
        tl.store(faulty + b, True)


class FusedRows:
    """`norm`, `rotate`, `gate` and `append` of `RowKernels`."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None = None) -> Tensor:
        """See `RowKernels`."""
        out = torch.empty_like(x)
        if x.shape[0]:
            norm_launch(x, weight, epsilon, more, out).run()
        return out

    def rotate(self, x: Tensor, heads: int, cos_sin: Tensor) -> None:
        """See `RowKernels`. Products and sums stay separate, so results equal the definition's to the bit."""
        if x.shape[0]:
            rotate_launch(x, heads, cos_sin).run()

    def gate(self, x: Tensor) -> Tensor:
        """See `RowKernels`."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        if x.shape[0]:
            gate_launch(x, out).run()
        return out

    def append(self, pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> None:
        """See `RowKernels`."""
        if k.shape[0]:
            append_launch(pool, spans, k, v, faulty).run()


def norm_launch(x: Tensor, weight: Tensor, epsilon: float, more: Tensor | None, out: Tensor) -> Launch:
    """The launch that adds `more` to `x` and writes `out`. Raises `ValueError` naming what is not contiguous."""
    _check_whole(x=x, weight=weight, more=x if more is None else more)
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    arguments = {
        "x": x,
        "more": x if more is None else more,
        "weight": weight,
        "out": out,
        "epsilon": epsilon,
        "N": n,
        "BLOCK": block,
        "ADDED": more is not None,
    }
    return Launch(norm_kernel, (rows,), arguments, warps=_warps(block))


def rotate_launch(x: Tensor, heads: int, cos_sin: Tensor) -> Launch:
    """The launch that turns `x`. Raises `ValueError` naming what is not contiguous."""
    _check_whole(cos_sin=cos_sin)
    rows, _, dim = x.shape
    pairs = triton.next_power_of_2(dim // 2)
    arguments = {
        "x": x,
        "cos_sin": cos_sin,
        "row_stride": x.stride(0),
        "ROTATED": heads,
        "D": dim,
        "HEADS": HEADS_AT_ONCE,
        "PAIRS": pairs,
    }
    grid = (rows, -(-heads // HEADS_AT_ONCE))
    return Launch(rotate_kernel, grid, arguments, warps=_warps(HEADS_AT_ONCE * pairs), fusion=False)


def gate_launch(x: Tensor, out: Tensor) -> Launch:
    """The launch that writes `out`. Raises `ValueError` naming what is not contiguous."""
    _check_whole(x=x)
    rows, n = out.shape
    block = min(COLUMNS_AT_ONCE, triton.next_power_of_2(n))
    arguments = {"x": x, "out": out, "N": n, "BLOCK": block}
    return Launch(gate_kernel, (rows, -(-n // block)), arguments, warps=_warps(block))


def append_launch(pool: Pool, spans: Spans, k: Tensor, v: Tensor, faulty: Tensor) -> Launch:
    """The launch that writes rows to their slots, or sets `faulty`."""
    rows, heads, dim = k.shape
    block = triton.next_power_of_2(heads * dim)
    arguments = {
        "k": k,
        "v": v,
        "open_k": pool.open_k,
        "open_v": pool.open_v,
        "starts": spans.starts,
        "slots": spans.slots,
        "faulty": faulty,
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "slot_stride": pool.open_k.stride(0),
        "head_stride": pool.open_k.stride(1),
        "HEADS": heads,
        "D": dim,
        "PI": pool.page_tokens,
        "SINK": pool.window.sink,
        "RECENT": pool.window.recent,
        "BLOCK": block,
    }
    return Launch(append_kernel, (rows,), arguments, warps=_warps(block))


def _check_whole(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def _warps(elements: int) -> int:
    """The number of warps with which a lane takes 16 bytes, at most `MOST_WARPS`."""
    return min(MOST_WARPS, max(1, elements // (LANE_ELEMENTS * WARP)))
