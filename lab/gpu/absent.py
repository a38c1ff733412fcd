"""GPUs that are not there, to compile for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

WARP: Final = 32


class Absent(DriverBase):  # type: ignore[misc]
    """A GPU of some architecture, with the answers that Triton's compiler asks for."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, WARP)

    @classmethod
    def is_active(cls) -> bool:
        """False: this driver is set, not detected."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not available: nothing is launched."""
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        """The architecture to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """A number that differs by architecture: Triton remembers by device what it has compiled."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        """A stream of a device that runs nothing."""
        return device

    def get_active_torch_device(self) -> Any:
        """Not available: there is no device."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Not available: there is nothing to time."""
        raise NotImplementedError


@contextmanager
def target_of(arch: int) -> Iterator[GPUTarget]:
    """While the context is open, kernels that ask for their target get this one, and so do launches."""
    active, absent = driver._active, Absent(arch)
    driver.set_active(absent)
    try:
        yield absent.get_current_target()
    finally:
        driver._active = active
