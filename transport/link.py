"""What a link is: one connection of two processes that moves payloads in one direction, beside gRPC.

gRPC keeps everything else: handshakes, headers, verdicts, and the messages by which both ends of a link agree
(`transport/pair.py`). A link moves one parcel after another, in the order in which the receiver posts them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, cast

from hackkv.errors import ConfigError
from hackkv.types import Payload

CONNECT_TIMEOUT_S: Final = 30.0
"""How long both ends of a link may take to connect."""
PARCEL_TIMEOUT_S: Final = 60.0
"""How long a parcel may take once its receiver is ready. 8 MiB take as long at 1.1 Mbit/s."""


class Exchange(Protocol):
    """What both ends tell each other while they connect, over the channel that knows its peer. Any thread may call."""

    def put(self, name: str, value: bytes) -> None:
        """Say `value` under `name`, to the other end and to this one."""
        ...

    def get(self, name: str) -> bytes:
        """Wait for what was said under `name`. Raises `NodeLost` when the pair is lost or nothing comes in time."""
        ...


@dataclass(frozen=True, slots=True)
class Checksum:
    """What `mix64` (`hack_kernels/mix64.py`) makes of a parcel's bytes with a seed; both are in 0 .. 2**64 - 1.

    A parcel's seed is its place, so that right bytes in place of others fail too. Planes have checksums of their own;
    this one is compared before the bytes leave the device on which they have arrived.
    """

    seed: int
    value: int


def parcel_seed(pair: int, number: int) -> int:
    """Of parcel `number` of pair `pair`, both below 2**32."""
    return pair << 32 | number


class Link(Protocol):
    """One end of a link. One thread calls `connect` and `send`, and what `post` returns; they block, with a deadline.

    They raise `NodeLost` or `DeadlineExceeded`; after that, and after `abort`, the link is of no use any more. A parcel
    that has arrived damaged raises `FrameRefused`, and the link goes on.
    """

    def connect(self, exchange: Exchange) -> None:
        """Meet the other end, which connects at the same time."""
        ...

    def post(self, size: int, checksum: Checksum | None = None) -> Callable[[], Payload]:
        """Take memory for the next parcel and expect it. Returns at once; the function returned waits for its bytes.

        `checksum` comes with the parcels of kinds that have one.
        """
        ...

    def send(self, payload: Payload) -> None:
        """Send a parcel that the other end has posted."""
        ...

    def abort(self) -> None:
        """Let the other end know, and release everything. Any thread may call, repeatedly, and never waits."""
        ...


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link that this process can use."""

    name: str
    dialect: str
    """What both ends have to agree on: library and version."""
    open: Callable[[int, str], Link]
    """Makes an end, not connected, from its rank (0 sends, 1 receives) and the host at which peers reach it."""
    checksum: Callable[[Payload, int], int] | None = None
    """`Checksum.value` of a parcel in host memory, from its seed; None where payloads stay in host memory all the way:
    then nothing has them in its hands that the checksums of planes do not cover."""


LINKS: Final[Mapping[str, str]] = MappingProxyType(
    {"gloo": "transport.gloo_link", "nccl": "transport.nccl_link", "nixl": "transport.nixl_link"}
)
"""Name -> module with `create() -> LinkKind`, which raises `ConfigError` in one line where it cannot be used. They are
loaded on use: they need torch, which the router never loads."""


def link_kind(name: str) -> LinkKind:
    """The kind of that name. Raises `ConfigError` that names what this process lacks for it."""
    try:
        return cast(LinkKind, importlib.import_module(LINKS[name]).create())
    except ImportError as error:
        raise ConfigError(f"wire: {name}: {error}") from error
