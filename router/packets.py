"""Messages between processes of the router: lengths, a JSON object, and bytes that need not be JSON."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, Final

from hackkv.errors import Unavailable

LENGTH: Final = struct.Struct("<II")
"""Before a message: lengths of its JSON object and of its bytes."""


def pack(head: dict[str, Any], data: bytes | bytearray = b"") -> bytes:
    """A message without its `data`, which the caller sends after it."""
    text = json.dumps(head).encode()
    return LENGTH.pack(len(text), len(data)) + text


async def read_packet(reader: asyncio.StreamReader, most: int | None = None) -> tuple[dict[str, Any], bytes]:
    """The next message. Raises `asyncio.IncompleteReadError` at the end, `Unavailable` for more than `most` bytes."""
    head, size = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if most is not None and head + size > most:
        raise Unavailable(f"a message of {head + size} bytes, at most {most} are accepted")
    told: dict[str, Any] = json.loads(await reader.readexactly(head))
    return told, await reader.readexactly(size)
