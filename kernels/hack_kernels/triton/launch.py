"""A launch as a value: the backend runs it on a GPU, and `lab/gpu/inspect.py` compiles the same value without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor

INTERPRETER: Final = threading.Lock() if triton.knobs.runtime.interpret else nullcontext()
"""Triton's interpreter keeps its state in one place, so it runs one kernel at a time. A GPU queues kernels itself."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid, its arguments and the compiler's options.

    Software pipelining is off by default: it would move codes through shared memory, which they do not need.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Parameter name -> a tensor, Triton's descriptor of a tensor that is an argument too, an integer, a compile-time
    value, or None for a tensor that this launch goes without."""
    warps: int
    stages: int = 1
    registers: int | None = None
    """Register limit of a thread; None leaves it to the assembler."""
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

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(value.device for value in self.arguments.values() if isinstance(value, Tensor))

    def run(self) -> None:
        """Enqueue on the current stream of the tensors' device, whatever the calling thread's current device is."""
        if instead := _instead.get():
            instead(self)
            return
        device = self.device
        with INTERPRETER, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)


_instead: ContextVar[Callable[[Launch], None] | None] = ContextVar("instead", default=None)


@contextmanager
def instead_of_launching(take: Callable[[Launch], None]) -> Iterator[None]:
    """While the context is open, launches of this thread go to `take` and to no device. Their `out` is zeros, so that
    what follows computes with numbers."""

    def take_and_clear(launch: Launch) -> None:
        take(launch)
        if isinstance(out := launch.arguments.get("out"), Tensor):
            out.zero_()

    before = _instead.set(take_and_clear)
    try:
        yield
    finally:
        _instead.reset(before)
