"""A launch as a value: what the backend runs on a GPU is what `inspect.py` compiles without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    assembler: str | None = None
    """Further options of ptxas."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": self.fusion,
            **({"ptx_options": self.assembler} if self.assembler else {}),
        }

    def run(self) -> None:
        """Enqueue on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)
