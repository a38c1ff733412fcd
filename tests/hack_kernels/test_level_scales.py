"""Scales of rows of levels in a byte."""

from __future__ import annotations

import torch
from hack_kernels.level_format import Scales
from hack_kernels.reference.levels import pack_scales, unpack_scales


def test_bytes_of_scales_are_numbers_in_ascending_order_each_nearest_to_what_it_rounds() -> None:
    every = torch.arange(1, 248, dtype=torch.uint8)
    values = unpack_scales(every, Scales.FP8)
    assert torch.equal(pack_scales(values, Scales.FP8), every)
    assert (float(values[0]), float(values[-1])) == (2.0**-17, 61440)
    assert bool((values.diff() > 0).all())
    halves = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)  # all that are positive and finite
    packed = pack_scales(halves, Scales.FP8)
    distance = (halves.double()[:, None] - values.double()).abs()
    chosen = distance.gather(1, packed.long()[:, None] - 1)[:, 0]
    assert torch.equal(chosen, distance.amin(1))
    ties = (distance == chosen[:, None]).sum(1) == 2
    assert bool(ties.any())
    assert not bool((packed[ties] & 1).any())
