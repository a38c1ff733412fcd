"""Links over gloo's TCP connections, which torch provides. Payloads bypass the interpreter and gRPC's framing.

Each link is a process group of two. Both ends meet over the `Exchange`, so no port of a store is opened.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hackkv.errors import ConfigError, DeadlineExceeded, HackkvError, NodeLost
from hackkv.types import Payload
from transport.link import CONNECT_TIMEOUT_S, PARCEL_TIMEOUT_S, Checksums, Exchange, LinkKind

_PARCEL_TIMEOUT: Final = timedelta(seconds=PARCEL_TIMEOUT_S)
_WORD: Final = 8


def create(_: Checksums) -> LinkKind:
    """The kind `gloo` of `LINKS`. Both ends need the same major and minor version of torch. Raises `ConfigError`."""
    if not dist.is_gloo_available():
        raise ConfigError("wire: gloo: this build of torch has no gloo")
    major, minor = torch.__version__.split(".")[:2]
    return LinkKind("gloo", f"gloo of torch {major}.{minor}", GlooLink)


class GlooLink:
    """A `Link`. `abort` closes the connection; the peer's calls end at once. A call that waits at this end ends when
    the peer closes too, or at its deadline if the peer is silent."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank, self._peer, self._host = rank, 1 - rank, host
        self._group: Any = None  # ProcessGroupGloo; torch's stub of it lacks nearly everything

    def connect(self, exchange: Exchange) -> None:
        """See `Link`. Gloo listens on a port of its own while it connects."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        options._threads = 1
        with _translating():
            options._devices = [gloo.create_device(hostname=self._host.strip("[]"))]
            self._group = gloo(_Rendezvous(exchange), self._rank, 2, options)

    def post(self, size: int) -> Callable[[], Payload]:
        """See `Link`."""
        group, room = self._connected(), torch.empty(size, dtype=torch.uint8)
        with _translating():
            work = group.recv([room], self._peer, 0)

        def arrived(
            group: object = group,
        ) -> Payload:  # a reference to the group: without it the peer's loss is not noticed
            with _translating():
                work.wait(_PARCEL_TIMEOUT)
            return room.numpy().tobytes()

        return arrived

    def send(self, payload: Payload) -> None:
        """See `Link`."""
        group, data = self._connected(), bytes(payload)
        with _translating():
            group.send([_readable(data)], self._peer, 0).wait(_PARCEL_TIMEOUT)

    def abort(self) -> None:
        """See `Link`."""
        self._group = None  # the group's destructor closes the connections, once no call uses the group

    def _connected(self) -> Any:
        if self._group is None:
            raise NodeLost("the link is closed")
        return self._group


class _Rendezvous(Store):
    """An `Exchange` with the interface that gloo needs. Each end sets its own address and then gets both.

    Gloo believes the sizes inside an address and reads beyond its end if they are wrong. So they are checked here.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._own = 0, 0

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub says str
        self._own = _sizes(bytes(value))
        self._exchange.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        value = self._exchange.get(key)
        if _sizes(value) != self._own:
            raise NodeLost(f"gloo: the peer's address has {len(value)} bytes that are none")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._exchange.get(key)


def _sizes(address: bytes) -> tuple[int, int]:
    """Two sizes of an address of gloo, which holds a host name, a socket address and numbers.

    They are the bytes of the socket address, as the address states them, and all bytes after the host name. Both are
    equal in all addresses of one version of gloo; only the name varies.
    """
    name = int.from_bytes(address[:_WORD], "little")
    at = _WORD + name
    return int.from_bytes(address[at : at + _WORD], "little"), len(address) - at


def _readable(data: bytes) -> Tensor:
    """A tensor over `data`, without a copy. The detour by ctypes avoids torch's warning of memory that is read-only."""
    at = np.frombuffer(data, dtype=np.uint8).ctypes.data
    view = (ctypes.c_uint8 * len(data)).from_address(at)
    view.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)


@contextmanager
def _translating() -> Iterator[None]:
    """Turn gloo's errors into errors of this project."""
    try:
        yield
    except HackkvError:
        raise
    except RuntimeError as error:
        said = str(error).splitlines()[0][:200]
        raise (DeadlineExceeded if "Timed out" in said else NodeLost)(f"gloo: {said}") from error
