"""Static rANS in C++ (csrc/rans.h). It runs on the host, whichever backend computes."""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hack_kernels.cpu.extension import compiled


class RansCoder(Protocol):
    """What the compiled extension has for rANS."""

    RANS_COLUMNS: int
    """The most columns of a plane."""

    def rans_encode(self, plane: NDArray[np.uint8], blocks: int, row: int, most: int) -> bytes | None:
        """`plane` in at most `most` bytes; None if it needs more. It is `blocks` blocks of rows of `row` bytes."""
        ...

    def rans_decode(self, coded: NDArray[np.uint8], plane: NDArray[np.uint8]) -> None:
        """Fill `plane`. Raises `ValueError` unless `coded` is exactly a plane of its size."""
        ...


def rans_coder() -> RansCoder:
    """Raises `BackendUnavailable` where the extension is not built, `ImportError` where it is out of date."""
    return cast(RansCoder, compiled())
