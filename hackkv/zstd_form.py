"""Wire form `zstd`: each plane is one Zstandard frame, of a format that any receiver can check before it decodes.

Elements of two bytes (FP16 scales, minima and rows) are split: their high bytes, sign and exponent, repeat and are
coded; their low bytes are noise and follow as they are. The frame carries its content's size, which must be the
plane's, and Zstandard's own checksum of the content. XXH3 of the coded bytes (`hackkv.framing`) comes before both.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard

from hackkv.wire_form import Bytes, WireForm

LEVEL: Final = 1
"""Higher levels look for repeated strings. Packed codes have none, so higher levels are slower and gain nothing."""
MAX_WINDOW_BYTES: Final = 8 << 20
"""The largest window that a frame may demand of its decoder; a frame of ours needs no more than its content."""
SPLIT_ITEMSIZE: Final = 2


class _Coders(threading.local):
    """A coder belongs to one thread. Each thread keeps one, because making it takes longer than coding a page."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


_CODERS: Final = _Coders()


class ZstdForm:
    """Implements `WireForm`."""

    name = "zstd"
    method = 1

    def cap(self, raw_bytes: int) -> int:
        """One byte less than the plane: what does not shrink is not coded."""
        return raw_bytes - 1

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """A frame, and behind it the low bytes of elements of two bytes."""
        low = plane[0::2].tobytes() if itemsize == SPLIT_ITEMSIZE else b""
        content = np.ascontiguousarray(plane[1::2]) if itemsize == SPLIT_ITEMSIZE else plane
        frame: bytes = _CODERS.compressor.compress(content.data)
        coded = frame + low
        return coded if len(coded) <= self.cap(plane.size) else None

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """See `WireForm.decode`."""
        if itemsize != SPLIT_ITEMSIZE:
            plane[:] = _content(coded, plane.size)
            return
        half = plane.size // 2
        if len(coded) < half:
            raise ValueError(f"{len(coded)} bytes cannot hold the {half} that are not coded")
        at = len(coded) - half
        plane[1::2] = _content(coded[:at], half)
        plane[0::2] = np.frombuffer(coded[at:], dtype=np.uint8)


def _content(frame: memoryview, size: int) -> Bytes:
    """The contents of one frame, `size` bytes. Raises `ValueError` for anything else, before it allocates."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != size:
            raise ValueError(f"a zstd frame of {header.content_size} bytes where {size} are due")
        if header.window_size > MAX_WINDOW_BYTES or header.dict_id or not header.has_checksum:
            raise ValueError(f"a zstd frame with a window of {header.window_size}, or not of our making")
        content: bytes = _CODERS.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    return np.frombuffer(content, dtype=np.uint8)


def create() -> WireForm:
    """The form `zstd`, for `WIRE_FORMS`."""
    return ZstdForm()
