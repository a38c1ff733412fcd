"""The table of wires. Settings, tests and measurements choose a wire by name, so a new wire is a module and a row.

A wire moves the KV of one request from a prefill node to a decode node. Both ends live in processes that already have a
control port. A `Site` holds what a process gives to its ends. A decode node announces an address for each of its wires.
The router names one of them to the prefill node as `wire://address`, and `Senders` takes the wire of that name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from hackkv.config import InternalConfig
from hackkv.errors import ConfigError, HandshakeRefused
from hackkv.nodes import WireAddress
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from transport.base import Deliver, KvListener, KvSender, Lend
from transport.closing import closing
from transport.delivery import FRAME_TIMEOUT_S
from transport.grpc_wire import GrpcListener, GrpcSender
from transport.inproc_wire import InprocNetwork
from transport.link import LINKS, Checksums, LinkKind, link_kind, on_host
from transport.rpc_server import PLAIN, RpcServer
from transport.trust import EVERYBODY, Trust, is_loopback

DEFAULT_WIRE = PLAIN


@dataclass(frozen=True, slots=True)
class Site:
    """What a process gives to the ends of its wires. The server's owner closes it."""

    server: RpcServer
    """The server of control calls. An end of a wire may add calls of its own, and starts the server if necessary."""
    trust: Trust = EVERYBODY
    frame_timeout_s: float = FRAME_TIMEOUT_S
    """Seconds that a receiver waits for the next frame."""
    network: InprocNetwork = field(default_factory=InprocNetwork)
    """The network on which ends within one process meet."""
    xxh3_64: Checksums = on_host
    """Checks payloads that arrive on the compute device of the process."""
    links: Callable[[LinkKind], LinkKind] = lambda kind: kind
    """Applied to each kind of link before it is used: fault plans wrap it."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The constructors of both ends of one wire. The owner of an end closes it."""

    sender: Callable[[Site], KvSender]
    listener: Callable[[Site], KvListener]
    leaves_process: bool = True
    """Whether the ends may be in two processes."""
    guarded: bool = True
    """Whether all traffic passes the port that `Trust` guards. Sockets of links have neither token nor TLS."""
    check: Callable[[], object] = lambda: None
    """Raises a `ConfigError` of one line if this machine cannot use the wire."""


def linked(kind: Callable[[Checksums], LinkKind]) -> Wire:
    """A wire whose payloads travel over links of the kind that `kind` returns."""

    def lent(site: Site) -> LinkKind:
        return site.links(kind(site.xxh3_64))

    return Wire(
        sender=lambda site: GrpcSender(trust=site.trust, link=lent(site), host=site.server.host),
        listener=lambda site: GrpcListener(site.server, frame_timeout_s=site.frame_timeout_s, link=lent(site)),
        guarded=False,
        check=lambda: kind(on_host),
    )


WIRES: Mapping[str, Wire] = MappingProxyType(
    {
        PLAIN: Wire(
            sender=lambda site: GrpcSender(trust=site.trust),
            listener=lambda site: GrpcListener(site.server, frame_timeout_s=site.frame_timeout_s),
        ),
        "inproc": Wire(
            sender=lambda site: site.network.sender(),
            listener=lambda site: site.network.listener(frame_timeout_s=site.frame_timeout_s),
            leaves_process=False,
        ),
        **{name: linked(partial(link_kind, name)) for name in LINKS},
    }
)
"""Name -> wire."""


def check_wires(names: Sequence[str]) -> None:
    """Raise `ConfigError` if `names` is empty or holds a wire that a node process cannot use."""
    usable = [name for name, wire in WIRES.items() if wire.leaves_process]
    wrong = [name for name in names if name not in usable]
    if wrong or not names:
        raise ConfigError(f"wire: {', '.join(map(repr, wrong)) or 'none'}: nodes can use {', '.join(usable)}")


def check_machine(names: Sequence[str], host: str, config: InternalConfig) -> None:
    """Raise `ConfigError` if this machine cannot use a wire of `names`, or if the wire is too open for `host`.

    `host` is where the process listens for peers. Without `config.open`, only a guarded wire may leave the machine.
    """
    for name in names:
        WIRES[name].check()
        if not (WIRES[name].guarded or config.open or is_loopback(host)):
            raise ConfigError(
                f"wire: {name}: its sockets have neither token nor TLS: set internal.open: true if the network itself "
                f"is trusted, or take {DEFAULT_WIRE}"
            )


def open_senders(names: Iterable[str], site: Site) -> Senders:
    """A sender of every wire in `names`."""
    return Senders({name: WIRES[name].sender(site) for name in names})


class Senders:
    """A `KvSender` over several wires. The address names the wire: `grpc://host:port`."""

    def __init__(self, by_wire: Mapping[str, KvSender]) -> None:
        self._by_wire = by_wire

    @property
    def wires(self) -> tuple[WireAddress, ...]:
        """The wires that a sending node announces, without addresses."""
        return tuple(WireAddress(name, "") for name in self._by_wire)

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send one handoff by the wire that `address` names; see `KvSender.push`."""
        try:
            sender, place = self._reaching(address)
        except HandshakeRefused:
            async with closing(frames):
                raise
        return await sender.push(place, handoff, frames)

    def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch pages from the node at `address`; see `KvSender.fetch`. Raises `HandshakeRefused` as `push` does."""
        sender, place = self._reaching(address)
        return sender.fetch(place, handoff)

    async def close(self) -> None:
        """Close every sender."""
        for sender in self._by_wire.values():
            await sender.close()

    def _reaching(self, address: str) -> tuple[KvSender, str]:
        """The sender of the wire that `address` names, and the address on it."""
        wire, _, place = address.rpartition("://")
        sender = self._by_wire.get(wire)
        if sender is None:
            raise HandshakeRefused(f"wire: {address!r} is on none of this node's: {', '.join(self._by_wire)}")
        return sender, place


class Listeners:
    """The receiving ends of a decode node, one for each of its wires."""

    def __init__(self, names: Iterable[str], site: Site) -> None:
        self._by_wire = {name: WIRES[name].listener(site) for name in names}

    async def serve(self, deliver: Deliver, lend: Lend | None = None) -> tuple[WireAddress, ...]:
        """Start to accept handoffs, and to lend pages, on every wire; return the addresses to announce."""
        return tuple([WireAddress(name, await one.serve(deliver, lend)) for name, one in self._by_wire.items()])

    async def close(self) -> None:
        """Stop accepting; handoffs under way fail at their senders with `NodeLost`."""
        for one in self._by_wire.values():
            await one.close()


class Loopback:
    """Both ends of one wire within this process, on loopback: for tests and measurements."""

    def __init__(self, wire: str | Wire, frame_timeout_s: float = FRAME_TIMEOUT_S) -> None:
        self._wire = WIRES[wire] if isinstance(wire, str) else wire
        self._frame_timeout_s = frame_timeout_s
        self._network = InprocNetwork()
        self._servers: list[RpcServer] = []

    def sender(self) -> KvSender:
        """A new sender."""
        return self._wire.sender(self._site())

    def listener(self) -> KvListener:
        """A new listener at an address of its own."""
        return self._wire.listener(self._site())

    async def close(self) -> None:
        """Close the servers. The owner of senders and listeners closes them before."""
        while self._servers:
            await self._servers.pop().close()

    def _site(self) -> Site:
        server = RpcServer("127.0.0.1", 0)
        self._servers.append(server)
        return Site(server, frame_timeout_s=self._frame_timeout_s, network=self._network)
