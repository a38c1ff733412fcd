"""The router and the nodes on one event loop. Nodes can die, come back, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.machines import DecodeLink, Machine, PrefillLink, Workshop
from chaos.setup import Setup
from decode_node.pages import PagePool
from decode_node.service import DecodeService
from faults.injector import Injector
from faults.plan import FaultPlan
from hackkv.errors import HackkvError
from hackkv.model.worker import Worker
from hackkv.nodes import NodeIdentity
from hackkv.timing import StageClock
from hackkv.types import Request, Role, Token
from prefill_node.service import PrefillService
from router.fleet.fleet import Fleet
from router.life.dispatch import Dispatcher
from router.life.flight import Flight
from router.watch.metrics import Metrics
from transport.closing import reap
from transport.membership import keep_registered

ABORTED, COMPLETE = "aborted", "complete"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended for its client: `complete`, `aborted` by the client, or the code of an error."""

    how: str
    token_ids: tuple[int, ...]
    at_s: float
    failovers: int


class Cluster:
    """The router, the nodes and the clients of a scenario. `say` takes one line of the story at a time."""

    def __init__(self, setup: Setup, worker: Worker, plan: FaultPlan, say: Callable[[str], None]) -> None:
        self._setup, self._plan, self._say = setup, plan, say
        self._faults: dict[str, Injector] = {}
        """Node -> its faults. A restarted node gets the same injector, so the counts of rules go on."""
        self._loop = asyncio.get_running_loop()
        self._workshop = Workshop(setup, worker)
        self.machines: dict[str, Machine] = {}
        self.fleet = Fleet(
            lambda address: PrefillLink(self.machines, address),
            lambda address: DecodeLink(self.machines, address),
            lease_ttl_s=setup.lease_ttl_s,
        )
        self.dispatcher = Dispatcher(self.fleet, Metrics("chaos", self.fleet))
        self._clients: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._do(self.fleet.nodes.run())

    @property
    def codec(self) -> str:
        """The codec that all nodes use."""
        return self._setup.codec

    # What faults do -------------------------------------------------------------------------------------------------

    def kill(self, node: str, back_after_s: float) -> None:
        """End a node without notice; see `faults.injector.Hands`."""
        if node in self.machines:
            self._do(self._kill(node, back_after_s))

    def abort(self, request: str) -> None:
        """Make a client leave."""
        if request in self._clients:
            self._say(f"{request}: the client leaves")
            self._clients[request].cancel()

    def fill(self, node: str, seconds: float) -> None:
        """Take all free pages of a decode node for `seconds`."""
        machine = self.machines.get(node)
        if machine is not None and isinstance(machine.service, DecodeService):
            self._do(self._fill(node, machine.service.pool, seconds))

    # Machines -------------------------------------------------------------------------------------------------------

    async def start(self, role: Role, name: str, incarnation: int = 0) -> None:
        """Start a node and register it."""
        stack = contextlib.AsyncExitStack()
        faults = self._faults.setdefault(name, Injector(self._plan, name, self, self._say))
        identity = NodeIdentity(name, name, str(incarnation))
        make = self._workshop.prefill if role is Role.PREFILL else self._workshop.decode
        machine = self.machines[name] = await make(identity, faults, stack)
        members = asyncio.create_task(
            keep_registered(self.fleet.nodes, machine.face.describe, asyncio.Event(), asyncio.Event())
        )
        stack.push_async_callback(reap, members)
        self._say(f"{name}: up")

    async def stop(self, name: str) -> None:
        """End a node and everything that belongs to it."""
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

    async def _fill(self, node: str, pool: PagePool, seconds: float) -> None:
        grant = pool.take(pool.free_pages)
        if grant is None:
            return
        self._say(f"{node}: {len(grant.pages)} pages are taken")
        await asyncio.sleep(seconds)
        pool.give_back(grant)

    # Clients --------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Ending:
        """Serve one request; return its ending as the client sees it. An HTTP request takes the same path from the
        dispatcher on."""
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
        self._say(f"{request.request_id}: {how} with {len(flight.output.token_ids)} tokens")
        return Ending(how, tuple(flight.output.token_ids), self._loop.time(), flight.route.attempts - 1)

    def _heard(self, request: Request, token: Token) -> bool:
        if token.index == 0:
            self._say(f"{request.request_id}: first token")
        return True

    # The end --------------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """The statistics of the living nodes, summed by name."""
        sums: dict[str, float] = defaultdict(float)
        for machine in self.machines.values():
            for name, value in (await machine.service.describe()).stats:
                sums[name] += value
        return sums

    async def leftovers(self) -> list[str]:
        """A line for everything that the router and the nodes still hold; empty when they hold nothing."""
        found = [f"router: {self.dispatcher.inflight} in flight"] if self.dispatcher.inflight else []
        for member in self.fleet.nodes.members():
            booked = (member.booked.requests, member.booked.tokens, member.booked.pages)
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
