"""Rotation of heads in one launch, `rotate_heads` and `rotate_rows` of `RowKernels`, for codecs `rot-*`.

A row does not depend on the rows beside it: every launch has the same tile and adds up in the same order. Products
are TF32 in three parts, which is as exact as FP32 and runs on the matrix unit. A decode step has few rows and waits for
memory, so a program loads all of its matrix before it multiplies.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.head_rotations import HeadRotations
from hack_kernels.triton.launch import Launch
from hack_kernels.triton.tiles import BEYOND_HALF, rounded

ROWS: Final = 32
"""Pairs of row and head in a program. With 64, Triton takes Hopper's product of whole warp groups, whose sums have an
order of their own."""
CHANNELS: Final = 64
"""Outputs of a pair in a program."""
WARPS: Final = 4
STEP = tl.constexpr(16)
"""Channels that are added up at once."""


@triton.jit
def pairs_of(group, members, count, ROWS: tl.constexpr):
    """A program's pairs of row and head, of `members` heads from group·members on: rows, heads [ROWS], and whether the
    pairs exist [ROWS, 1]."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return (pair // members).to(tl.int64), group * members + pair % members, (pair < count * members)[:, None]


@triton.jit
def channels_of(D: tl.constexpr, CHANNELS: tl.constexpr):
    """A program's channels of outputs, [1, CHANNELS], and whether they exist."""
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return channel, channel < D


@triton.jit
def widened(x, NARROW: tl.constexpr):
    """x in FP32. NARROW: x is rounded to FP16 first; values beyond FP16 become infinite."""
    x = x.to(tl.float32)
    if NARROW:
        held = tl.abs(x) < BEYOND_HALF  # false for NaN, too
        x = tl.where(held, tl.where(held, x, 0.0).to(tl.float16).to(tl.float32), float("inf"))
    return x


@triton.jit
def rotated_rows(x, seen, matrix, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, NARROW: tl.constexpr):
    """matrix [D, D] @ x for the heads at `x` [ROWS] that are `seen`: FP32 [ROWS, CHANNELS] of a program's channels.

    NARROW: x is rounded to FP16 first.
    """
    channel, inside = channels_of(D, CHANNELS)
    parts = ()
    columns = ()
    for first in tl.static_range(0, D, STEP):
        i = first + tl.arange(0, STEP)
        parts = parts + (tl.load(x[:, None] + i[None, :], mask=seen, other=0.0),)
        columns = columns + (tl.load(matrix + channel * D + i[:, None], mask=inside, other=0.0),)
    rotated = tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in tl.static_range(D // STEP):
        rotated = tl.dot(widened(parts[step], NARROW), columns[step], rotated, input_precision="tf32x3")
    return rotated


@triton.jit(do_not_specialize=["count"])
def rotate_heads_kernel(
    x,
    matrices,
    shift,
    out,
    row_stride,
    count,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Grid (blocks of ROWS pairs of row and head, groups of MEMBERS heads, blocks of CHANNELS).

    x [count, groups·MEMBERS, D] with `row_stride` between rows; out likewise, contiguous; matrices [groups, D, D] and
    shift [groups, D], contiguous.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    group, groups = tl.program_id(1), tl.num_programs(1)
    row, head, seen = pairs_of(group, MEMBERS, count, ROWS)
    channel, inside = channels_of(D, CHANNELS)
    at = x + row * row_stride + head * D
    rotated = rotated_rows(at, seen, matrices + group * (D * D), D, ROWS, CHANNELS, False)
    if SHIFTED:
        rotated += tl.load(shift + group * D + channel, mask=inside, other=0.0)
    place = out + (row * (groups * MEMBERS * D) + head * D)[:, None] + channel
    tl.store(place, rounded(rotated, DTYPE), mask=seen & inside)


@triton.jit
def rotate_one(
    x,
    row_stride,
    matrices,
    shift,
    out,
    group,
    count,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHIFTED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """A program's part of Q, K or V: x [count, HEADS, D] in GROUPS groups, of which the program has one. Without
    groups, x is rounded to FP16 and not rotated."""
    MEMBERS: tl.constexpr = HEADS // max(GROUPS, 1)
    row, head, seen = pairs_of(group, MEMBERS, count, ROWS)
    channel, inside = channels_of(D, CHANNELS)
    at = x + row * row_stride + head * D
    if GROUPS:
        rotated = rotated_rows(at, seen, matrices + group * (D * D), D, ROWS, CHANNELS, NARROW)
        if SHIFTED:
            rotated += tl.load(shift + group * D + channel, mask=inside, other=0.0)
    else:
        rotated = widened(tl.load(at[:, None] + channel, mask=seen & inside, other=0.0), True)
    tl.store(out + (row * (HEADS * D) + head * D)[:, None] + channel, rotated, mask=seen & inside)


@triton.jit(do_not_specialize=["count"])
def rotate_rows_kernel(
    q,
    k,
    v,
    query,
    key,
    shift,
    value,
    out,
    q_stride,
    k_stride,
    v_stride,
    count,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Grid (blocks of ROWS pairs of row and head, groups of Q, then of K, then of V, blocks of CHANNELS).

    q [count, Q_HEADS, D], k and v [count, KV_HEADS, D] with strides between rows; query, key, value [groups, D, D] and
    shift [K_GROUPS, D], contiguous; out: Q, K and V one after another, contiguous. V with no groups is not rotated.
    """
    group = tl.program_id(1)
    k_out = out + count.to(tl.int64) * (Q_HEADS * D)
    v_out = k_out + count.to(tl.int64) * (KV_HEADS * D)
    if group < Q_GROUPS:
        rotate_one(q, q_stride, query, shift, out, group, count, Q_HEADS, Q_GROUPS, D, ROWS, CHANNELS, False, False)
    elif group < Q_GROUPS + K_GROUPS:
        group -= Q_GROUPS
        rotate_one(k, k_stride, key, shift, k_out, group, count, KV_HEADS, K_GROUPS, D, ROWS, CHANNELS, SHIFTED, True)
    else:
        group -= Q_GROUPS + K_GROUPS
        rotate_one(v, v_stride, value, shift, v_out, group, count, KV_HEADS, V_GROUPS, D, ROWS, CHANNELS, False, True)


class RotatedHeads:
    """`rotate_heads` and `rotate_rows` of `RowKernels`."""

    def rotate_heads(
        self, x: Tensor, matrices: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See `RowKernels`."""
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if x.shape[0]:
            rotation_launch(x, matrices, shift, out).run()
        return out

    def rotate_rows(self, q: Tensor, k: Tensor, v: Tensor, rotations: HeadRotations) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowKernels`. All three lie in one piece of memory."""
        out = torch.empty(q.numel() + k.numel() + v.numel(), dtype=torch.float32, device=q.device)
        if q.shape[0]:
            rotations_launch(q, k, v, rotations, out).run()
        q_out, k_out, v_out = out.split_with_sizes((q.numel(), k.numel(), v.numel()))
        return q_out.view(q.shape), k_out.view(k.shape), v_out.view(v.shape)


def rotation_launch(x: Tensor, matrices: Tensor, shift: Tensor | None, out: Tensor) -> Launch:
    """The launch that writes `out`, which is contiguous."""
    (count, heads, dim), groups = x.shape, matrices.shape[0]
    arguments = {
        "x": x,
        "matrices": matrices,
        "shift": matrices if shift is None else shift,
        "out": out,
        "row_stride": x.stride(0),
        "count": count,
        "MEMBERS": heads // groups,
        "D": dim,
        "ROWS": ROWS,
        "CHANNELS": CHANNELS,
        "SHIFTED": shift is not None,
    }
    grid = (-(-count * (heads // groups) // ROWS), groups, -(-dim // CHANNELS))
    return Launch(rotate_heads_kernel, grid, arguments, warps=WARPS)


def rotations_launch(q: Tensor, k: Tensor, v: Tensor, rotations: HeadRotations, out: Tensor) -> Launch:
    """The launch that writes Q, K and V to `out`, one after another."""
    (count, q_heads, dim), kv_heads = q.shape, k.shape[1]
    query, key, shift, value = rotations.query, rotations.key, rotations.shift, rotations.value
    groups = query.shape[0], key.shape[0], 0 if value is None else value.shape[0]
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "query": query,
        "key": key,
        "shift": key if shift is None else shift,
        "value": key if value is None else value,
        "out": out,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "count": count,
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "Q_GROUPS": groups[0],
        "K_GROUPS": groups[1],
        "V_GROUPS": groups[2],
        "D": dim,
        "ROWS": ROWS,
        "CHANNELS": CHANNELS,
        "SHIFTED": shift is not None,
    }
    most = max(heads // max(each, 1) for heads, each in zip((q_heads, kv_heads, kv_heads), groups, strict=True))
    grid = (-(-count * most // ROWS), groups[0] + groups[1] + max(groups[2], 1), -(-dim // CHANNELS))
    return Launch(rotate_rows_kernel, grid, arguments, warps=WARPS)
