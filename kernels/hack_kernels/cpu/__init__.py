"""Backend `cpu`: the C++ kernels of `kernels/csrc`, with the instruction set chosen at run time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from hack_kernels.base import (
    Backend,
    BackendUnavailable,
    FormatT,
    KernelsT,
    PageFormat,
    PageKernels,
    RowKernels,
    Stopwatch,
)
from hack_kernels.checksums import xxh3_64
from hack_kernels.compiler import Compiler
from hack_kernels.cpu import extension
from hack_kernels.cpu.hack import HackCpu
from hack_kernels.cpu.levels import LevelCpu
from hack_kernels.cpu.reading import for_deltas, for_floats, for_groups, for_huffman, for_levels
from hack_kernels.cpu.rows import RowCpu
from hack_kernels.cpu.rowwise import RowwiseCpu
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat
from hack_kernels.hack_format import HackFormat
from hack_kernels.huffman_format import HuffmanFormat
from hack_kernels.level_format import LevelFormat
from hack_kernels.nuq_format import NuqFormat
from hack_kernels.row_format import RowFormat

ISA_VARIABLE: Final = "HACKKV_CPU_ISA"
"""Environment variable that forces an instruction set: avx512-amx, avx512-bf16, avx512-vnni, avx2 or portable."""

FORMATS: Final[dict[type[PageFormat], Callable[[Any, Any], PageKernels | None]]] = {
    DeltaFormat: for_deltas,
    FloatFormat: for_floats,
    GroupFormat: for_groups,
    HackFormat: HackCpu,
    HuffmanFormat: for_huffman,
    LevelFormat: LevelCpu,
    NuqFormat: for_levels,
    RowFormat: RowCpu.for_format,
}
"""Class of page format -> function of a format and the compiled kernels; it returns None for an unsupported shape."""

_log = logging.getLogger(__name__)


class CpuBackend:
    """Implements `Backend`. Raises `BackendUnavailable` where the extension or the instruction set is missing."""

    name = "cpu"
    compiler: Compiler | None = None

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        supported = extension.supported_isas()
        self.isa = isa or supported[0]
        if self.isa not in supported:
            raise BackendUnavailable(
                f"this processor or build does not run instruction set {self.isa!r}; it runs {', '.join(supported)}"
            )
        self.device = torch.device("cpu")
        self._native = extension.compiled().kernels(self.isa, threads or torch.get_num_threads())
        self.rows: RowKernels = RowwiseCpu(self._native)

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        """C++ kernels, if there are any for the format and its shape."""
        compiled = FORMATS[type(fmt)](fmt, self._native) if type(fmt) in FORMATS else None
        return definition(fmt, self.device) if compiled is None else cast(KernelsT, compiled)

    def stopwatch(self) -> Stopwatch:
        """The host's clock: calls return when the work is done. Recorded steps read it too."""
        made: Stopwatch = extension.compiled().Stopwatch()
        return made

    def xxh3_64(self, pieces: Sequence[Tensor], seed: int) -> list[int]:
        """XXH3-64 by the library `xxhash`."""
        return xxh3_64(pieces, seed)

    def use_threads(self, threads: int) -> None:
        """Set the threads of torch and of the C++ kernels."""
        torch.set_num_threads(threads)
        self.threads = threads

    @property
    def threads(self) -> int:
        """Threads of one call, the caller's included."""
        return int(self._native.threads)

    @threads.setter
    def threads(self, threads: int) -> None:
        self._native.threads = threads


def create(device: torch.device | None = None) -> Backend:
    """The fastest instruction set of this processor, or the one that HACKKV_CPU_ISA names."""
    if device is not None and device.type != "cpu":
        raise BackendUnavailable(f"it computes on the processor, not on {device}")
    backend = CpuBackend(os.environ.get(ISA_VARIABLE) or None)
    _log.info("cpu kernels: instruction set %s, %d threads", backend.isa, backend.threads)
    return backend
