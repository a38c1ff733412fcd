"""A launch as a value: what the backend runs on a GPU is what `inspect.py` compiles without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

BLACKWELL: Final = 100
"""sm_100, its first architecture."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything that it is called with.

    Software pipelining is off by default: it would send codes through shared memory, and they need no such stop.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """By parameter name: tensors, integers and compile-time values."""
    warps: int
    stages: int = 1
    registers: int | None = None
    """The most that a thread may take; None leaves it to the assembler."""
    fusion: bool = True
    """Let multiplications fuse into additions."""
    warps_on_blackwell: int | None = None
    """Warps from sm_100 on, where that differs: accumulators rest in tensor memory there, and registers run short."""

    def options(self, arch: int) -> dict[str, Any]:
        """Options of Triton's compiler for sm_`arch`."""
        return {
            "num_warps": self.warps_on_blackwell if self.warps_on_blackwell and arch >= BLACKWELL else self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": self.fusion,
        }

    def run(self) -> None:
        """Enqueue on the current stream."""
        arch = 0
        if self.warps_on_blackwell and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            arch = 10 * major + minor
        self.kernel[self.grid](**self.arguments, **self.options(arch))
