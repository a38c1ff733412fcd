"""Which GPUs the kernels run on, and why not on others."""

from __future__ import annotations

from typing import Final

import torch

OLDEST: Final = (8, 0)
"""Compute capability from which Triton multiplies INT8 on matrix units (A100); Triton itself starts at 8.0 too."""


def missing(device: torch.device) -> str | None:
    """What keeps `device` from running the kernels, in words; None if nothing does."""
    if device.type != "cuda":
        return f"device {device} is no CUDA device"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (a torch build without CUDA, or no driver)"
    return missing_in(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def missing_in(name: str, capability: tuple[int, int]) -> str | None:
    """`missing` for a GPU of this name and compute capability."""
    if capability >= OLDEST:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 "
        "(A100, A10, L4 or newer), as Triton has no INT8 matrix product on older GPUs: use backend cpu there"
    )
