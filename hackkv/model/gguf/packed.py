"""Rows of a GGUF file's packed types as codes in our own form, exactly (`hack_kernels.block_weight`)."""

from __future__ import annotations

from typing import Final

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hack_kernels.block_weight import Codes
from torch import Tensor

_Kind = GGMLQuantizationType

HELD: Final = {_Kind.Q8_0: 8, _Kind.Q4_0: 4, _Kind.Q4_1: 4}
"""Types that have a form here, and the bits of its codes."""


def codes_of(rows: Tensor, kind: GGMLQuantizationType) -> Codes:
    """The codes in rows of the file, uint8 [rows, bytes]; `kind` is one of `HELD`."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.unflatten(1, (-1, block_bytes))
    numbers = 2 if kind is _Kind.Q4_1 else 1
    halves = blocks[..., : 2 * numbers].contiguous().view(torch.float16)
    codes, scale = blocks[..., 2 * numbers :], halves[..., 0]
    if kind is _Kind.Q8_0:
        return (codes ^ 128).flatten(1), scale, None  # a signed byte plus 128
    nibbles = torch.cat((codes & 15, codes >> 4), dim=-1).flatten(1)
    return nibbles, scale, halves[..., 1] if kind is _Kind.Q4_1 else -8 * scale
