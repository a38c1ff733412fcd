"""Launches on rows: rotations, and the kernels between the products of a layer."""

from __future__ import annotations

import torch
from hack_kernels.head_rotations import HeadRotations
from hack_kernels.level_format import LevelFormat
from hack_kernels.triton.head_rotation import rotation_launch, rotations_launch
from hack_kernels.triton.row_ops import append_launch, gate_launch, norm_launch, rotate_launch

from lab.gpu.example import KV_HEADS, TOKENS, Example, empty, pool_of, sequences


def rotation(head_dim: int, group: int) -> Example:
    """The rotation of the query heads of 32 sequences."""
    x = empty(32, KV_HEADS * group, head_dim, dtype=torch.float32)
    matrices = empty(KV_HEADS, head_dim, head_dim, dtype=torch.float32)
    return Example(f"rotation D={head_dim} G={group}", rotation_launch(x, matrices, None, torch.empty_like(x)))


def between_products(batch: int) -> tuple[Example, ...]:
    """The launches of a layer of an 8B Llama beside products and attention, in BF16, with 64 rows a page."""
    heads, dim, hidden, ffn = 32, 128, 4096, 14336
    fmt, name = LevelFormat(dim, 64), f"batch {batch}"
    x, weight = empty(batch, hidden, dtype=torch.bfloat16), empty(hidden, dtype=torch.bfloat16)
    both, flags = empty(batch, 2 * ffn, dtype=torch.bfloat16), empty(batch, dtype=torch.bool)
    qkv = empty(batch, heads + 2 * KV_HEADS, dim, dtype=torch.bfloat16)
    q, k, v = qkv.split_with_sizes((heads, KV_HEADS, KV_HEADS), dim=1)
    square = empty(1, dim, dim, dtype=torch.float32)
    rotated = empty(qkv.numel(), dtype=torch.float32)
    launches = {
        "norm": norm_launch(x, weight, 1e-5, None, x),
        "sum and norm": norm_launch(x, weight, 1e-5, x, x),
        "rotary embedding": rotate_launch(qkv, heads + KV_HEADS, empty(batch, dim, dtype=torch.float32)),
        "gate": gate_launch(both, empty(batch, ffn, dtype=torch.bfloat16)),
        "append": append_launch(pool_of(fmt, TOKENS), sequences(1, batch), k, v, flags),
        "rotation of rows": rotations_launch(q, k, v, HeadRotations(square, square), rotated),
    }
    return tuple(Example(f"{what} {name}", launch) for what, launch in launches.items())
