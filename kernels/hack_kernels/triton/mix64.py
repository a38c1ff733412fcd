"""`mix64` of bytes where they lie: one launch, one number back."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hack_kernels.mix64 import FIRST, PHI, SECOND
from hack_kernels.triton.launch import Launch

_PHI: Final = tl.constexpr(PHI)
_FIRST: Final = tl.constexpr(FIRST)
_SECOND: Final = tl.constexpr(SECOND)
BLOCK: Final = 1024
"""Words of a program."""


@triton.jit
def mix64_kernel(data, state, nbytes, BLOCK: tl.constexpr):
    """Add the words of `data` [nbytes], mixed, to `state[0]`; `state[1]` is the seed."""
    seed = tl.load(state + 1).to(tl.uint64, bitcast=True)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, 8)
    at = place[:, None] * 8 + lane[None, :]  # by bytes: planes begin anywhere
    pieces = tl.load(data + at, mask=at < nbytes, other=0).to(tl.uint64)
    mixed = tl.sum(pieces << (lane * 8)[None, :].to(tl.uint64), axis=1) ^ place.to(tl.uint64) * _PHI ^ seed
    mixed = (mixed ^ mixed >> 33) * _FIRST
    mixed = (mixed ^ mixed >> 33) * _SECOND
    mixed = tl.where(place * 8 < nbytes, mixed ^ mixed >> 33, 0)
    tl.atomic_add(state, tl.sum(mixed).to(tl.int64, bitcast=True))


def launch_mix64(data: Tensor, state: Tensor) -> Launch:
    """Add to `state`, int64 [sum, seed], what `data`, uint8 [bytes] and contiguous, brings."""
    arguments = {"data": data, "state": state, "nbytes": data.numel(), "BLOCK": BLOCK}
    return Launch(mix64_kernel, (triton.cdiv(data.numel(), 8 * BLOCK),), arguments, warps=4)


def mix64(data: Tensor, seed: int) -> int:
    """See `hack_kernels.mix64`. Waits for the device."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    state = torch.tensor([data.numel(), signed], dtype=torch.int64, device=data.device)
    if data.numel():
        launch_mix64(data, state).run()
    return int(state[0].item()) % 2**64
