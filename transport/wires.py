"""The table of wires. A contract test loops over it, so a new wire is tested the day it is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from transport.base import KvListener, KvSender
from transport.grpc_wire import GrpcListener, GrpcSender
from transport.inproc_wire import InprocNetwork
from transport.rpc_server import RpcServer


class Wire(Protocol):
    """Makes both ends of one kind of wire on this machine."""

    def sender(self) -> KvSender:
        """A new sender."""
        ...

    def listener(self) -> KvListener:
        """A new listener at an address of its own."""
        ...

    async def close(self) -> None:
        """Close what the wire itself opened; senders and listeners are closed by their owner, before."""
        ...


class InprocWire:
    """Both ends in one event loop."""

    def __init__(self, frame_timeout_s: float) -> None:
        self._network = InprocNetwork(frame_timeout_s=frame_timeout_s)
        self._count = 0

    def sender(self) -> KvSender:
        """A new sender."""
        return self._network.sender()

    def listener(self) -> KvListener:
        """A new listener at an address of its own."""
        self._count += 1
        return self._network.listener(f"inproc-{self._count}")

    async def close(self) -> None:
        """Nothing is open."""


class GrpcWire:
    """Loopback gRPC; each listener has a server of its own."""

    def __init__(self, frame_timeout_s: float) -> None:
        self._frame_timeout_s = frame_timeout_s
        self._servers: list[RpcServer] = []

    def sender(self) -> KvSender:
        """A new sender."""
        return GrpcSender()

    def listener(self) -> KvListener:
        """A new listener on a free port of 127.0.0.1."""
        server = RpcServer("127.0.0.1", 0)
        self._servers.append(server)
        return GrpcListener(server, frame_timeout_s=self._frame_timeout_s)

    async def close(self) -> None:
        """Close the servers."""
        while self._servers:
            await self._servers.pop().close()


WIRES: Mapping[str, Callable[[float], Wire]] = MappingProxyType({"inproc": InprocWire, "grpc": GrpcWire})
"""Name -> factory; the argument is the receiver's `frame_timeout_s`."""
