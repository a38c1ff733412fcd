"""Backend `reference`: the definitions in plain torch, on whatever device torch runs on.

These files serve reading, not speed: they are never optimised, and every other backend is tested against them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hack_kernels.base import Backend, BackendUnavailable, FormatT, KernelsT, RowKernels, Stopwatch
from hack_kernels.checksums import xxh3_64
from hack_kernels.compiler import Compiler
from hack_kernels.rowwise import Rowwise
from hack_kernels.stopwatch import HostStopwatch


class ReferenceBackend:
    """Implements `Backend` with the definition of every format."""

    name = "reference"
    isa = "torch"
    compiler: Compiler | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.rows: RowKernels = Rowwise()

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        """The definition."""
        return definition(fmt, self.device)

    def stopwatch(self) -> Stopwatch:
        """The host's clock: calls return when the work is done."""
        return HostStopwatch()

    def xxh3_64(self, pieces: Sequence[Tensor], seed: int) -> list[int]:
        """XXH3-64 by the library `xxhash`, on the host."""
        return xxh3_64(pieces, seed)

    def use_threads(self, threads: int) -> None:
        """Set torch's threads. There are no others."""
        torch.set_num_threads(threads)


def create(device: torch.device | None = None) -> Backend:
    """The reference runs wherever torch does; by default on the processor."""
    if device is not None and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendUnavailable(f"torch finds no {device}; it finds {torch.cuda.device_count()} GPUs")
    return ReferenceBackend(device)
