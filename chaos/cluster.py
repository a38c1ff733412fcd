"""Router and nodes on one event loop, where nodes can die, come back, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from chaos.setup import Setup
from decode_node.service import DecodeService
from faults.injector import Injector
from faults.plan import FaultPlan
from faults.seams import FaultyDecode, FaultyPrefill, FaultySender
from hackkv.errors import HackkvError, NodeLost
from hackkv.model.worker import Worker
from hackkv.pages import PagePool
from hackkv.timing import StageClock
from hackkv.types import (
    DecodeEvent,
    DecodeJob,
    NodeIdentity,
    NodeInfo,
    PrefillEvent,
    PrefillJob,
    Request,
    Role,
    Token,
)
from prefill_node.service import PrefillService
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.flight import Flight
from router.lifecycle import Deadlines
from router.metrics import Metrics
from transport.base import DecodeNode, PrefillNode
from transport.closing import closing, reap
from transport.inproc_wire import InprocNetwork
from transport.membership import keep_registered

ABORTED, COMPLETE = "aborted", "complete"

EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended for its client: `complete`, `aborted` by the client, or the code of an error."""

    how: str
    token_ids: tuple[int, ...]
    at_s: float
    failovers: int


@dataclass(eq=False, slots=True)
class Machine:
    """A node while it lives."""

    name: str
    role: Role
    service: PrefillService | DecodeService
    face: FaultyPrefill | FaultyDecode
    """The service, under its faults."""
    close: contextlib.AsyncExitStack
    dead: asyncio.Event = field(default_factory=asyncio.Event)


class Cluster:
    """Everything that a scenario acts on. `say` takes one line of the story at a time."""

    def __init__(self, setup: Setup, worker: Worker, plan: FaultPlan, say: Callable[[str], None]) -> None:
        self._setup, self._worker, self._plan, self._say = setup, worker, plan, say
        self._faults: dict[str, Injector] = {}
        """By node: what a rule has counted outlives the node's death."""
        self._loop = asyncio.get_running_loop()
        self._network = InprocNetwork(frame_timeout_s=setup.frame_timeout_s)
        self.fleet = Fleet(self._prefill_at, self._decode_at, lease_ttl_s=setup.lease_ttl_s)
        self.dispatcher = Dispatcher(self.fleet, Metrics("chaos", self.fleet), Deadlines())
        self.machines: dict[str, Machine] = {}
        self._clients: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._do(self.fleet.run())

    @property
    def codec(self) -> str:
        """The codec that all nodes use."""
        return self._setup.codec

    # The world's hands ----------------------------------------------------------------------------------------------

    def kill(self, node: str, back_after_s: float) -> None:
        """End a node without a word; see `faults.injector.Hands`."""
        if node in self.machines:
            self._do(self._kill(node, back_after_s))

    def abort(self, request: str) -> None:
        """Make a client leave."""
        if request in self._clients:
            self._say(f"{request}: the client leaves")
            self._clients[request].cancel()

    def fill(self, node: str, seconds: float) -> None:
        """Take all free memory of a node for a while."""
        machine = self.machines.get(node)
        if machine is not None and isinstance(machine.service, DecodeService):
            self._do(self._fill(node, machine.service.pool, seconds))

    # Machines -------------------------------------------------------------------------------------------------------

    async def start(self, role: Role, name: str, incarnation: int = 0) -> None:
        """Start a node and register it."""
        stack = contextlib.AsyncExitStack()
        faults = self._faults.setdefault(name, Injector(self._plan, name, self, self._say))
        identity = NodeIdentity(name, name, str(incarnation))
        make = self._prefill_machine if role is Role.PREFILL else self._decode_machine
        machine = self.machines[name] = await make(identity, faults, stack)
        members = asyncio.create_task(
            keep_registered(self.fleet, machine.face.describe, asyncio.Event(), asyncio.Event())
        )
        stack.push_async_callback(reap, members)
        self._say(f"{name}: up")

    async def stop(self, name: str) -> None:
        """End a node and all that it holds."""
        machine = self.machines.pop(name)
        machine.dead.set()
        await machine.close.aclose()

    async def _kill(self, name: str, back_after_s: float) -> None:
        if name not in self.machines:
            return
        machine = self.machines[name]
        self._say(f"{name}: dead")
        await self.stop(name)
        if back_after_s:
            await asyncio.sleep(back_after_s)
            await self.start(machine.role, name, incarnation=round(self._loop.time() * 1e6))

    async def _prefill_machine(
        self, identity: NodeIdentity, faults: Injector, stack: contextlib.AsyncExitStack
    ) -> Machine:
        sender = FaultySender(self._network.sender(), faults)
        stack.push_async_callback(sender.close)
        service = PrefillService(
            identity,
            self._own_worker(),
            sender,
            num_pages=self._setup.prefill_pages,
            max_prompts=32,
            chunk_tokens=self._setup.chunk_tokens,
            host_bytes=self._setup.host_bytes,
        )
        stack.push_async_callback(service.close)
        return Machine(identity.node_id, Role.PREFILL, service, FaultyPrefill(service, faults), stack)

    async def _decode_machine(
        self, identity: NodeIdentity, faults: Injector, stack: contextlib.AsyncExitStack
    ) -> Machine:
        service = DecodeService(
            identity,
            self._own_worker(),
            num_pages=self._setup.decode_pages,
            max_sequences=32,
            max_batch=self._setup.max_batch,
            host_bytes=self._setup.host_bytes,
        )
        stack.push_async_callback(service.close)
        listener = self._network.listener(identity.address)
        await listener.serve(service.inbox.deliver)
        stack.push_async_callback(listener.close)
        return Machine(identity.node_id, Role.DECODE, service, FaultyDecode(service, faults), stack)

    def _own_worker(self) -> Worker:
        """The same weights, and timers of its own."""
        return replace(self._worker, codec=copy(self._worker.codec))

    async def _fill(self, node: str, pool: PagePool, seconds: float) -> None:
        grant = pool.take(pool.free_pages)
        if grant is None:
            return
        self._say(f"{node}: {len(grant.pages)} pages are taken")
        await asyncio.sleep(seconds)
        pool.give_back(grant)

    # Clients --------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Ending:
        """Be a client of the router: the same path as HTTP takes, from the dispatcher on."""
        flight = Flight(request, StageClock(self._loop.time), emit=lambda token: self._heard(request, token))
        task = self._clients[request.request_id] = asyncio.create_task(self.dispatcher.serve(flight))
        try:
            await task
            how = COMPLETE
        except asyncio.CancelledError:
            how = ABORTED
        except HackkvError as error:
            how = error.code
            self._say(f"{request.request_id}: {error}")
        finally:
            del self._clients[request.request_id]
        self._say(f"{request.request_id}: {how} with {len(flight.token_ids)} tokens")
        return Ending(how, tuple(flight.token_ids), self._loop.time(), flight.attempts - 1)

    def _heard(self, request: Request, token: Token) -> bool:
        if token.index == 0:
            self._say(f"{request.request_id}: first token")
        return True

    # The end --------------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """What the living nodes count, summed."""
        sums: dict[str, float] = defaultdict(float)
        for machine in self.machines.values():
            for name, value in (await machine.service.describe()).stats:
                sums[name] += value
        return sums

    async def leftovers(self) -> list[str]:
        """What is still held somewhere, in words; empty when everything has come home."""
        found = [f"router: {self.dispatcher.inflight} in flight"] if self.dispatcher.inflight else []
        for member in self.fleet.members():
            booked = (member.requests, member.tokens, member.pages)
            if any(booked):
                found.append(f"router: {booked} requests, tokens, pages booked on {member.node_id}")
        for machine in self.machines.values():
            info = await machine.service.describe()
            held = (info.total_pages - info.free_pages, info.running, info.waiting, info.queued_tokens)
            if any(held):
                found.append(f"{machine.name}: {held} pages, running, waiting, tokens held")
            if isinstance(machine.service, PrefillService) and machine.service.outbox.held_bytes:
                found.append(f"{machine.name}: {machine.service.outbox.held_bytes} bytes in the outbox")
        return found

    async def close(self) -> None:
        """Stop everything."""
        if self._background:
            await reap(*self._background)
        for name in list(self.machines):
            await self.stop(name)

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The network ----------------------------------------------------------------------------------------------------

    def _prefill_at(self, address: str) -> PrefillNode:
        return _PrefillLink(self, address)

    def _decode_at(self, address: str) -> DecodeNode:
        return _DecodeLink(self, address)

    def machine_at(self, address: str) -> Machine:
        """The machine that lives there. Raises `NodeLost`."""
        if address not in self.machines:
            raise NodeLost(f"{address} does not answer")
        return self.machines[address]


@dataclass(frozen=True, slots=True)
class _PrefillLink:
    """A `PrefillNode` at an address of the cluster, whoever lives there at the time of the call."""

    cluster: Cluster
    address: str

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt there."""
        machine, node = self._there()
        async with closing(_until_dead(machine, node.prefill(job))) as events:
            async for event in events:
                yield event

    async def assign(self, transfer_id: str, epoch: int, decode_address: str) -> None:
        """Name a decode node."""
        await self._there()[1].assign(transfer_id, epoch, decode_address)

    async def describe(self) -> NodeInfo:
        """Ask how it is."""
        return await self._there()[1].describe()

    def _there(self) -> tuple[Machine, FaultyPrefill]:
        machine = self.cluster.machine_at(self.address)
        if not isinstance(machine.face, FaultyPrefill):
            raise NodeLost(f"{self.address} is no prefill node")
        return machine, machine.face


@dataclass(frozen=True, slots=True)
class _DecodeLink:
    """A `DecodeNode` at an address of the cluster, whoever lives there at the time of the call."""

    cluster: Cluster
    address: str

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request there."""
        machine, node = self._there()
        async with closing(_until_dead(machine, node.decode(job))) as events:
            async for event in events:
                yield event

    async def describe(self) -> NodeInfo:
        """Ask how it is."""
        return await self._there()[1].describe()

    def _there(self) -> tuple[Machine, FaultyDecode]:
        machine = self.cluster.machine_at(self.address)
        if not isinstance(machine.face, FaultyDecode):
            raise NodeLost(f"{self.address} is no decode node")
        return machine, machine.face


async def _until_dead(machine: Machine, events: AsyncIterator[EventT]) -> AsyncIterator[EventT]:
    """The events of a call, until the machine dies under it."""
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
