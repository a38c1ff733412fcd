"""The GPUs on which the kernels run, and why others are refused. No Triton is imported, so any process can ask.

Looking at a GPU opens a CUDA context, which does not survive a fork. So ask in a process that will not fork any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch

OLDEST: Final = (8, 0)
"""Compute capability from which Triton multiplies INT8 on matrix units (A100); Triton itself starts at 8.0 too."""
NO_TRITON: Final = "Triton is not installed: pip install 'hackkv[gpu]'"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a process can reach."""

    fault: str = ""
    """Why torch reaches no GPU; empty if it reaches some."""
    found: tuple[tuple[str, tuple[int, int]], ...] = ()
    """Name and compute capability of each, in CUDA's order, which `CUDA_VISIBLE_DEVICES` decides."""
    triton: bool = True
    """Whether Triton is installed."""

    def missing(self, index: int) -> str | None:
        """The reason why GPU `index` cannot run the kernels, in words; None if it can."""
        if self.fault:
            return f"torch sees no CUDA device: {self.fault}"
        if index >= len(self.found):
            return f"torch sees no CUDA device cuda:{index}, but {len(self.found)} (CUDA_VISIBLE_DEVICES chooses them)"
        return missing_in(*self.found[index]) or (None if self.triton else NO_TRITON)

    @property
    def usable(self) -> tuple[str, ...]:
        """The devices that run the kernels, by torch's names."""
        return tuple(f"cuda:{index}" for index in range(len(self.found)) if self.missing(index) is None)


def gpus() -> Gpus:
    """Look at this machine."""
    if torch.version.cuda is None:
        return Gpus(f"torch {torch.__version__} is built without CUDA")
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no driver, one that is too old, or no GPU that this process may use
        return Gpus(str(error).splitlines()[0])
    indices = range(torch.cuda.device_count())
    found = tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices)
    return Gpus(found=found, triton=find_spec("triton") is not None)


def missing(device: torch.device) -> str | None:
    """The reason why `device` cannot run the kernels, in words; None if it can."""
    if device.type != "cuda":
        return f"device {device} is no CUDA device"
    return gpus().missing(device.index or 0)


def missing_in(name: str, capability: tuple[int, int]) -> str | None:
    """`missing` for a GPU of this name and compute capability."""
    if capability >= OLDEST:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 "
        "(A100, A10, L4 or newer), as Triton has no INT8 matrix product on older GPUs: use device cpu there"
    )
