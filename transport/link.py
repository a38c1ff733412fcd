"""The protocol of links. A link is one connection of two processes that moves payloads one way, beside gRPC.

Everything else stays with gRPC: handshakes, headers, verdicts, and the messages by which both ends of a link agree
(`transport/pair.py`). A link moves one parcel after another, in the order in which the receiver posts them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

import xxhash

from hackkv.errors import ConfigError
from hackkv.types import Payload

CONNECT_TIMEOUT_S: Final = 30.0
"""Seconds that both ends of a link may take to connect."""
PARCEL_TIMEOUT_S: Final = 60.0
"""Seconds that a parcel may take once its receiver is ready. 8 MiB take 60 s at 1.1 Mbit/s."""


Checksums = Callable[[Sequence[Any], int], list[int]]
"""Gives the XXH3-64 of tensors of bytes, with a seed, on their device. Their type is `Any` since torch stays unloaded
here."""


def on_host(pieces: Sequence[Any], seed: int) -> list[int]:
    """`Checksums` computed on the host, from copies."""
    return [xxhash.xxh3_64_intdigest(piece.cpu().numpy().data, seed) for piece in pieces]


class Exchange(Protocol):
    """Values that both ends tell each other while they connect, over the stream of their pair. Any thread may call."""

    def put(self, name: str, value: bytes) -> None:
        """Publish `value` under `name`, to the other end and to this one."""
        ...

    def get(self, name: str) -> bytes:
        """Wait for the value under `name`. Raises `NodeLost` when the pair is lost or nothing comes in time."""
        ...


class Link(Protocol):
    """One end of a link. One thread calls `connect`, `send` and the functions from `post`; they block, with a deadline.

    They raise `NodeLost` or `DeadlineExceeded`. After an error or `abort` the link cannot be used any more. A link
    checks no bytes: planes have checksums, which are compared when a frame is opened.
    """

    def connect(self, exchange: Exchange) -> None:
        """Meet the other end, which connects at the same time."""
        ...

    def post(self, size: int) -> Callable[[], Payload]:
        """Allocate memory for the next parcel and expect it. Returns, at once, a function that waits for its bytes."""
        ...

    def send(self, payload: Payload) -> None:
        """Send a parcel that the other end has posted."""
        ...

    def abort(self) -> None:
        """Let the other end know, and release everything. Any thread may call, repeatedly. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link that this process can use."""

    name: str
    dialect: str
    """Library and version, on which both ends have to agree."""
    open: Callable[[int, str], Link]
    """Makes an unconnected end from its rank (0 sends, 1 receives) and the host at which peers reach it."""


LINKS: Final[Mapping[str, str]] = MappingProxyType(
    {"gloo": "transport.gloo_link", "nccl": "transport.nccl_link", "nixl": "transport.nixl_link"}
)
"""Name -> module with `create(xxh3_64: Checksums) -> LinkKind`, which raises a `ConfigError` of one line where the kind
cannot be used. Modules are loaded on use: they need torch, which the router never loads."""


def link_kind(name: str, xxh3_64: Checksums = on_host) -> LinkKind:
    """The kind named `name`; `xxh3_64` checks payloads that arrive on a device. Raises `ConfigError` that names what
    this process lacks."""
    try:
        return cast(LinkKind, importlib.import_module(LINKS[name]).create(xxh3_64))
    except ImportError as error:
        raise ConfigError(f"wire: {name}: {error}") from error
