"""The transport of a connection, which sends together what one round of the event loop writes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

GATHERED_BYTES: Final = 1 << 16
"""Bytes beyond which everything written is sent at once, however much more comes in the same round."""


class Gathered(asyncio.Transport):
    """A connection's transport, which sends together what is written in one round of the event loop.

    Each `send` of the system costs more than an event of a stream, and makes the client wake up.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner, self._loop = inner, loop
        self._parts: list[bytes] = []
        self._bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > GATHERED_BYTES:
            self._flush()

    def write_eof(self) -> None:
        self._flush()
        self._inner.write_eof()

    def close(self) -> None:
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        self._parts.clear()
        self._inner.abort()

    def _flush(self) -> None:
        if self._parts:
            self._inner.write(b"".join(self._parts))
            self._parts.clear()
            self._bytes = 0
