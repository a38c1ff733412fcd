"""Wire form `rans`: each plane under static rANS of order 0, its tables in front of it (kernels/csrc/rans.h).

CacheGen codes its integers arithmetically, with a table for each layer and channel that is profiled offline. Here
tables are made from each plane, so nothing is calibrated and every codec may use the form:

- Symbols are nibbles or whole bytes as they rest, whichever takes less. Codes of 4 bits are nibbles, and a nibble of
  packed codes of 2 or 1 bits is some of them.
- Channels of a head that are alike share one of at most 16 tables. A table for each channel would cost more than it
  saves: a channel has only 512 codes in a frame of 8 pages.
- Eight states take turns, so that a processor decodes several symbols at a time.

Elements of two bytes are split as in `zstd`: their high bytes are coded, their low bytes are noise. The plane's size
leads the code, and a receiver compares it before it decodes. Decoding has to end in the state in which encoding began.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
from hack_kernels.base import BackendUnavailable
from hack_kernels.rans import RansCoder, rans_coder

from hackkv.wire_form import Bytes, WireForm

SPLIT_ITEMSIZE: Final = 2
BLOCK_PAGES: Final = 8
"""Pages of a head, at least, for which a channel keeps its table: means of channels drift along a text."""


class RansForm:
    """Implements `WireForm` with the compiled coder."""

    name = "rans"
    method = 2

    def __init__(self, coder: RansCoder) -> None:
        self._coder = coder

    def cap(self, raw_bytes: int) -> int:
        """One byte less than the plane: what does not shrink is not coded."""
        return raw_bytes - 1

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """Tables and states, then words; behind them the low bytes of elements of two bytes."""
        low = plane[0::2].tobytes() if itemsize == SPLIT_ITEMSIZE else b""
        content = np.ascontiguousarray(plane[1::2]) if itemsize == SPLIT_ITEMSIZE else plane
        most = self.cap(plane.size) - len(low)
        coded = self._coder.rans_encode(content, *self._grid(shape, content.size), max(0, most))
        return None if coded is None else coded + low

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """See `WireForm.decode`. Decoding takes 256 KiB for tables beside the plane, and no more."""
        code = np.frombuffer(coded, dtype=np.uint8)
        if itemsize != SPLIT_ITEMSIZE:
            self._coder.rans_decode(code, plane)
            return
        half = plane.size // 2
        if code.size < half:
            raise ValueError(f"{code.size} bytes cannot hold the {half} that are not coded")
        content = np.empty(half, dtype=np.uint8)
        self._coder.rans_decode(code[: code.size - half], content)
        plane[1::2] = content
        plane[0::2] = code[code.size - half :]

    def _grid(self, shape: Sequence[int], size: int) -> tuple[int, int]:
        """(blocks, bytes of a row): some pages of a head are a block; fewer blocks where the coder takes no more."""
        if len(shape) < 2 or not size:
            return 1, 1
        heads, pages, row = shape[0], shape[1], size // prod(shape[:-1])
        parts = (part for part in range(pages // BLOCK_PAGES, 1, -1) if len(shape) > 2 and pages % part == 0)
        for blocks in (*(heads * part for part in parts), heads, 1):
            if blocks * row <= self._coder.RANS_COLUMNS and size % (blocks * row) == 0:
                return blocks, row
        return 1, 1


def create() -> WireForm:
    """The form `rans`, for `WIRE_FORMS`."""
    try:
        return RansForm(rans_coder())
    except BackendUnavailable as error:
        raise ImportError(str(error)) from error
