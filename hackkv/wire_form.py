"""Forms of planes on the wire: bytes of planes at rest -> coded bytes that travel -> the same bytes.

A wire form is lossless and knows nothing of codecs: a plane is an array of bytes and the size of its elements. The
sender chooses it (`wire_form` among a codec's settings) and names it in the handshake; a receiver must know the form
but need not send in it. Coded sizes may differ from page to page. A plane that coding does not shrink travels uncoded,
so coding never makes a frame larger; each plane's header names the method of its bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hackkv.errors import ConfigError

Bytes = NDArray[np.uint8]
"""One dimension, contiguous."""

UNCODED: Final = 0
"""The method of bytes that travel as they rest; every receiver takes it."""


class WireForm(Protocol):
    """One way to code planes. Implementations keep no state between calls: several threads share one."""

    name: str
    """Its name in the handshake."""
    method: int
    """Its number in headers: `UNCODED`, or a number of its own in 1..255."""

    def cap(self, raw_bytes: int) -> int:
        """The largest coded size of a plane of `raw_bytes` that a receiver takes, checked before it allocates."""
        ...

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """The plane's elements of `itemsize` bytes, coded into at most `cap` bytes; None if they do not shrink.

        `shape` is the plane's in elements, [heads, pages, ..., row], where the caller knows it. A form may use it to
        code better; decoding does not need it.
        """
        ...

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """Fill `plane` with the decoded bytes. Raises `ValueError` unless `coded` decodes to exactly the plane's size.

        Whatever `coded` holds, decoding allocates no more than the plane's own size and tables of a fixed size.
        """
        ...


class RawForm:
    """Planes travel as they rest."""

    name = "raw"
    method = UNCODED

    def cap(self, raw_bytes: int) -> int:
        """The plane's own size."""
        return raw_bytes

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """There is nothing to code."""
        return None

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """Copy the bytes."""
        if len(coded) != plane.size:
            raise ValueError(f"{len(coded)} bytes for {plane.size}")
        plane[:] = np.frombuffer(coded, dtype=np.uint8)


RAW: Final = RawForm()


def create() -> WireForm:
    """The form `raw`, for `WIRE_FORMS`."""
    return RAW


WIRE_FORMS: Final[Mapping[str, str]] = {
    "raw": "hackkv.wire_form",
    "zstd": "hackkv.zstd_form",
    "rans": "hackkv.rans_form",
}
"""Name -> module with `create() -> WireForm`, which raises `ImportError` where a library is missing."""


def wire_form(name: str) -> WireForm:
    """The form of that name. Raises `ConfigError` when it is unknown here, or its library is not installed."""
    if name not in WIRE_FORMS:
        raise ConfigError(f"wire form {name!r} is unknown here; known: {', '.join(WIRE_FORMS)}")
    try:
        return cast(WireForm, importlib.import_module(WIRE_FORMS[name]).create())
    except ImportError as error:
        raise ConfigError(f"wire form {name!r} cannot be used: {error}") from error
