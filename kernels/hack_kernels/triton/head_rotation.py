"""Rotation of heads, `RowKernels.rotate_heads`, in one launch: codecs `rot-*` do it to Q and K.

In FP32 with sums in one order, so that a row does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.triton.launch import Launch

ROWS_AT_ONCE = 16
CHANNELS_AT_ONCE = 64


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
    group, groups = tl.program_id(1), tl.num_programs(1)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = (pair // MEMBERS).to(tl.int64), group * MEMBERS + pair % MEMBERS
    seen = (pair < count * MEMBERS)[:, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = channel < D
    rotated = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, D, 16):
        i = first + tl.arange(0, 16)
        part = tl.load(x + (row * row_stride + head * D)[:, None] + i[None, :], mask=seen, other=0.0)
        matrix = tl.load(matrices + group * (D * D) + channel * D + i[:, None], mask=inside, other=0.0)
        rotated = tl.dot(part, matrix, rotated, input_precision="ieee")
    if SHIFTED:
        rotated += tl.load(shift + group * D + channel, mask=inside, other=0.0)
    at = out + (row * (groups * MEMBERS * D) + head * D)[:, None] + channel
    tl.store(at, rotated, mask=seen & inside)


class RotatedHeads:
    """`rotate_heads` of `RowKernels`."""

    def rotate_heads(
        self, x: Tensor, matrices: Tensor, shift: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """See `RowKernels`."""
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            rotation_launch(x, matrices, shift, out).run()
        return out.to(dtype)


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
        "ROWS": ROWS_AT_ONCE,
        "CHANNELS": CHANNELS_AT_ONCE,
        "SHIFTED": shift is not None,
    }
    grid = (-(-count * (heads // groups) // ROWS_AT_ONCE), groups, -(-dim // CHANNELS_AT_ONCE))
    return Launch(rotate_heads_kernel, grid, arguments, warps=4)
