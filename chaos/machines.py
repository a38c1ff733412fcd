"""The nodes of a scenario: machines that can die, and links that look up the machine at an address for each call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeVar

from chaos.setup import Setup
from decode_node.config import DecodeSettings
from decode_node.service import DecodeService
from faults.injector import Injector
from faults.links import faulty_links
from faults.seams import FaultyDecode, FaultyPrefill, FaultySender, lending
from hackkv.errors import NodeLost
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.model.worker import Worker
from hackkv.nodes import NodeIdentity, NodeInfo
from hackkv.types import DecodeEvent, DecodeJob, PrefillEvent, PrefillJob, Role
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from transport.closing import closing, reap
from transport.inproc_wire import InprocNetwork
from transport.rpc_server import RpcServer
from transport.wires import Listeners, Site, open_senders

EventT = TypeVar("EventT")


@dataclass(eq=False, slots=True)
class Machine:
    """A node that runs."""

    name: str
    role: Role
    service: PrefillService | DecodeService
    face: FaultyPrefill | FaultyDecode
    """The service, wrapped in its faults."""
    close: contextlib.AsyncExitStack
    dead: asyncio.Event = field(default_factory=asyncio.Event)


class Workshop:
    """Makes machines of one setup around one model."""

    def __init__(self, setup: Setup, worker: Worker) -> None:
        self._setup, self._worker = setup, worker
        self._network = InprocNetwork()

    async def prefill(self, identity: NodeIdentity, faults: Injector, stack: contextlib.AsyncExitStack) -> Machine:
        """Start a prefill node. `stack` closes it."""
        senders = open_senders([self._setup.wire], self._site(faults, stack))
        sender = FaultySender(senders, faults)
        stack.push_async_callback(sender.close)
        service = PrefillService(
            replace(identity, wires=senders.wires),
            self._own_worker(),
            sender,
            self._setup.prefill_pages,
            PrefillSettings(max_prompts=32, chunk_tokens=self._setup.chunk_tokens, host_bytes=self._setup.host_bytes),
        )
        stack.push_async_callback(service.close)
        return Machine(identity.node_id, Role.PREFILL, service, FaultyPrefill(service, faults), stack)

    async def decode(self, identity: NodeIdentity, faults: Injector, stack: contextlib.AsyncExitStack) -> Machine:
        """Start a decode node, which listens. `stack` closes it."""
        service = DecodeService(
            identity,
            self._own_worker(),
            self._setup.decode_pages,
            DecodeSettings(max_sequences=32, max_batch=self._setup.max_batch, host_bytes=self._setup.host_bytes),
        )
        stack.push_async_callback(service.close)
        listeners = Listeners([self._setup.wire], self._site(faults, stack))
        await service.listen(listeners, lending(service.inbox.lend, faults))
        stack.push_async_callback(listeners.close)
        return Machine(identity.node_id, Role.DECODE, service, FaultyDecode(service, faults), stack)

    def _site(self, faults: Injector, stack: contextlib.AsyncExitStack) -> Site:
        """A site with a port of its own and links that suffer `faults`."""
        server = RpcServer("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        return Site(
            server,
            frame_timeout_s=self._setup.frame_timeout_s,
            network=self._network,
            xxh3_64=self._worker.backend.xxh3_64,
            links=faulty_links(faults),
        )

    def _own_worker(self) -> Worker:
        """A worker with the same weights and timers of its own."""
        return replace(self._worker, codec=copy(self._worker.codec))


@dataclass(frozen=True, slots=True)
class PrefillLink:
    """The `PrefillNode` that is at an address of the cluster at the time of a call."""

    machines: Mapping[str, Machine]
    address: str

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt at the node."""
        machine, node = self._there()
        async with closing(_until_dead(machine, node.prefill(job))) as events:
            async for event in events:
                yield event

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name a decode node."""
        await self._there()[1].assign(transfer_id, epoch, decode_address, held)

    async def describe(self) -> NodeInfo:
        """Ask how it is."""
        return await self._there()[1].describe()

    def _there(self) -> tuple[Machine, FaultyPrefill]:
        machine = _machine_at(self.machines, self.address)
        if not isinstance(machine.face, FaultyPrefill):
            raise NodeLost(f"{self.address} is no prefill node")
        return machine, machine.face


@dataclass(frozen=True, slots=True)
class DecodeLink:
    """The `DecodeNode` that is at an address of the cluster at the time of a call."""

    machines: Mapping[str, Machine]
    address: str

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request at the node."""
        machine, node = self._there()
        async with closing(_until_dead(machine, node.decode(job))) as events:
            async for event in events:
                yield event

    async def describe(self) -> NodeInfo:
        """Ask how it is."""
        return await self._there()[1].describe()

    def _there(self) -> tuple[Machine, FaultyDecode]:
        machine = _machine_at(self.machines, self.address)
        if not isinstance(machine.face, FaultyDecode):
            raise NodeLost(f"{self.address} is no decode node")
        return machine, machine.face


async def _until_dead(machine: Machine, events: AsyncIterator[EventT]) -> AsyncIterator[EventT]:
    """The events of a call. Raises `NodeLost` when its machine dies."""
    dead = asyncio.create_task(machine.dead.wait())
    try:
        async with closing(events):
            while True:
                step = asyncio.ensure_future(anext(events, None))
                try:
                    await asyncio.wait({step, dead}, return_when=asyncio.FIRST_COMPLETED)
                    if dead.done():
                        raise NodeLost(f"{machine.name} died")
                    event = step.result()
                finally:
                    await reap(step)
                if event is None:
                    return
                yield event
    finally:
        await reap(dead)


def _machine_at(machines: Mapping[str, Machine], address: str) -> Machine:
    if address not in machines:
        raise NodeLost(f"{address} does not answer")
    return machines[address]
