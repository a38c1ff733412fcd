"""Compiles kernels before they are called, for a backend whose first call of a kernel would compile it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

OnKernel = Callable[[int, int], None]
"""Called with the number of kernels that are compiled, and the number of those known to be needed."""


class Compiler(Protocol):
    """Compiles kernels that would else be compiled by their first call."""

    def batches(self, most: int) -> Sequence[int]:
        """Sizes of batches, up to `most`, that call every kernel."""
        ...

    def compiling(self, on_kernel: OnKernel) -> AbstractContextManager[object]:
        """While the context is open, the kernels that this thread calls are compiled, many at a time, and do not run:
        their results are zeros. Leaving the context waits for all of them. `on_kernel` is called by other threads."""
        ...
