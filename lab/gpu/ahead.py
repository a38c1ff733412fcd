"""Compile kernels for a GPU that is not here: runs fill Triton's cache, and launch nothing.

    with compiling_for(90):
        warm_up(worker, sizes)

A cache (`TRITON_CACHE_DIR`) counts on machines with the same Triton, to the byte of its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hack_kernels.triton.launch import Launch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

WARP: Final = 32


class Absent(DriverBase):  # type: ignore[misc]
    """A GPU of an architecture, as far as Triton's compiler asks."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)

    @classmethod
    def is_active(cls) -> bool:
        """It is chosen by name."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is launched."""
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        """The architecture."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Of a device that runs nothing."""
        return device

    def get_active_torch_device(self) -> Any:
        """There is none."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """There is nothing to time."""
        raise NotImplementedError


@contextmanager
def compiling_for(arch: int) -> Iterator[list[Any]]:
    """In the block a launch compiles its kernel, and its output is zeros. Yields what was compiled or found in the
    cache, in the order of launches."""
    compiled = list[Any]()

    def compile_only(launch: Launch) -> None:
        compiled.append(launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options))
        if isinstance(out := launch.arguments.get("out"), Tensor):
            out.zero_()

    run, active = Launch.run, driver._active
    driver.set_active(Absent(arch))
    Launch.run = compile_only  # type: ignore[assignment, method-assign]
    try:
        yield compiled
    finally:
        Launch.run = run  # type: ignore[method-assign]
        driver._active = active
