"""A prefill replica in simulated time: the live scheduler, page pool and host memory, and shipments of KV.

A pass takes as long as it costs. KV that a pass seals leaves layer by layer: all layers but the last from the moment at
which the first is done, the last one at the end of the pass. So a handoff ends no earlier than the prompt, and no
earlier than its bytes allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hackkv.held import HeldKv
from hackkv.timing import Stage
from prefill_node.host_pool import Claim, HostPool, Tenant
from prefill_node.scheduler import Chunk, PrefillScheduler, Prompt
from sim.costs import CostModel, PassCost
from sim.eventlog import EventKind
from sim.jobs import Job
from sim.network import Flow, Network, SharedLink
from sim.racks import Uplink, between
from sim.world import World


class Receiver(Protocol):
    """The destination of KV."""

    @property
    def links(self) -> tuple[SharedLink, ...]:
        """The receiver's line and its processing."""
        ...

    @property
    def uplink(self) -> Uplink | None:
        """The uplink of the receiver's rack; None without racks."""
        ...


@dataclass(slots=True, eq=False)
class SimulatedShipment:
    """One job's KV: from its first sealed page until the job is over."""

    job: Job
    sender: KvDispatch
    on_landed: Callable[[SimulatedShipment], None]
    receiver: Receiver | None = None
    made: int = 0
    """Bytes that are ready to leave."""
    sent: int = 0
    complete: bool = False
    """All bytes are ready."""
    claim: Claim | None = None
    kept: bool = True
    """Host memory still has the KV."""
    flow: Flow | None = None
    epoch: int = 0

    def assign(self, receiver: Receiver, held_pages: int = 0) -> None:
        """Send everything to `receiver`, from the beginning, but for the first pages, which it has. The exact rows of
        those pages are sent again, as for a prompt that does not continue an earlier one at its end."""
        self.give_up()
        self.receiver, self.sent = receiver, 0
        if held_pages:
            of, rows = self.sender.world.footprint, self.job.arrival.prompt_tokens
            self.sent = of.wire_bytes(rows) - of.wire_bytes(rows, HeldKv(held_pages))
        self.epoch += 1
        if self.complete:
            self.job.times.enter(Stage.TRANSFER, self.sender.world.now)
        self.pump()

    def give_up(self) -> None:
        """Stop the push under way, if there is one."""
        if self.flow is not None:
            self.sender.network.cancel(self.flow)
            self.flow = None
        self.receiver = None
        self.epoch += 1

    def pump(self) -> None:
        """Send what is ready, unless a push is under way."""
        sender = self.sender
        if self.receiver is None or self.flow is not None or not (self.complete or sender.early):
            return
        ready = self.made - self.sent
        if ready > 0:
            epoch, byte_s = self.epoch, sender.byte_s
            arrived = partial(self._arrived, epoch, ready * byte_s) if byte_s else partial(self._handled, epoch)
            links = (sender.line, *between(sender.uplink, self.receiver.uplink), *self.receiver.links)
            flow = self.flow = Flow(links, sender.flow_rate, arrived)
            self.sent = self.made
            self.job.account.wire_bytes += ready
            sender.network.start(flow, float(ready))
        elif self.complete:
            sender.world.compute(sender.setup_s, partial(self._committed, self.epoch))

    def _arrived(self, epoch: int, seconds: float) -> None:
        """The line has carried the bytes; now both ends spend processor time on them."""
        self.sender.world.compute(seconds, partial(self._handled, epoch))

    def _handled(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.flow = None
            self.pump()

    def _committed(self, epoch: int) -> None:
        if epoch == self.epoch and self.receiver is not None:
            self.on_landed(self)


@dataclass(slots=True, eq=False)
class KvDispatch:
    """How KV leaves a replica."""

    world: World
    network: Network
    line: SharedLink
    flow_rate: float
    """Bytes per second of one handoff at most."""
    setup_s: float
    byte_s: float
    """Seconds of a core for each byte, at each end."""
    early: bool
    """Layers leave while their pass still computes later ones."""
    blocking: bool
    """The replica computes nothing while it sends."""
    uplink: Uplink | None = None
    """The uplink of the replica's rack."""


@dataclass(slots=True)
class PrefillTally:
    """The work that a replica did."""

    tokens: int = 0
    passes: int = 0
    busy_s: float = 0.0
    cached_tokens: int = 0
    kind: int = 0
    """Index of the replica's pool in `Spec.prefill`."""


@dataclass(slots=True, eq=False)
class Pass:
    """A pass under way."""

    chunks: list[Chunk[Job]]
    began: float
    cost: PassCost
    layers_sent: dict[Job, int] = field(default_factory=dict)
    """Bytes of all layers but the last, which left during the pass."""


class PrefillReplica:
    """Owner of one scheduler. `on_first` is called with every job that has token 0."""

    def __init__(
        self,
        world: World,
        number: int,
        cost: CostModel,
        scheduler: PrefillScheduler[Job],
        host: HostPool,
        sender: KvDispatch,
    ) -> None:
        self.number, self.sender = number, sender
        self.scheduler = scheduler
        self.on_first: Callable[[Job, SimulatedShipment], None] = lambda _, __: None
        self.tally = PrefillTally()
        self._world, self._cost, self._host = world, cost, host
        self.shipments: dict[Job, SimulatedShipment] = {}
        self._pass: Pass | None = None
        self._dead = False

    def join(self, job: Job, on_landed: Callable[[SimulatedShipment], None]) -> SimulatedShipment:
        """Compute a prompt."""
        shipment = self.shipments[job] = SimulatedShipment(job, self.sender, on_landed)
        job.times.enter(Stage.PREFILL_QUEUE, self._world.now)
        self.scheduler.add(Prompt(job, job.arrival.prompt_tokens, job.names))
        self.wake()
        return shipment

    def leave(self, job: Job) -> None:
        """The job is over: give its host memory back, and see which waiting prompts fit. Its prompt is complete."""
        shipment = self.shipments.pop(job, None)
        if shipment is not None:
            shipment.give_up()
            shipment.kept = False
            if shipment.claim is not None:
                self._host.release(shipment.claim)
                shipment.claim = None
        self.wake()

    def delivered(self, shipment: SimulatedShipment) -> None:
        """A decode replica has the KV: keep it while there is room."""
        shipment.give_up()
        if shipment.claim is not None:
            self._host.change_tenant(shipment.claim, Tenant.KEPT)
        self.wake()

    def stop(self) -> list[SimulatedShipment]:
        """Let the node die. Returns the shipments that it had."""
        self._dead = True
        shipments = list(self.shipments.values())
        for shipment in shipments:
            shipment.give_up()
            shipment.kept = False
        self.shipments.clear()
        return shipments

    def wake(self) -> None:
        """Start a pass if there is something to compute and nothing forbids it."""
        if self._pass is not None or self._dead:
            return
        if (self.scheduler.waiting or self.scheduler.running) and not (self.sender.blocking and self._sends):
            self._start()

    def held_tokens(self, job: Job) -> int:
        """Tokens of a prompt that need not be computed here: at most all but the last."""
        pages = len(self.scheduler.pool.match(job.names))
        return min(pages * self._world.footprint.page_tokens, job.arrival.prompt_tokens - 1)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return self.scheduler.queued_tokens

    @property
    def _sends(self) -> bool:
        return any(one.complete and one.receiver is not None for one in self.shipments.values())

    def _start(self) -> None:
        chunks = self.scheduler.schedule(self._admit)
        if not chunks:
            return
        now = self._world.now
        cost = self._cost.prefill([(chunk.start, chunk.count) for chunk in chunks])
        run = self._pass = Pass(chunks, now, cost)
        for chunk in chunks:
            chunk.prompt.owner.times.enter(Stage.PREFILL, now)
        if self.sender.early and self._world.layers > 1:
            self._world.compute(cost.seconds / self._world.layers, partial(self._ship_layers, run))
        else:
            self._world.compute(cost.seconds, partial(self._end, run))

    def _admit(self, job: Job) -> bool:
        """Claim host memory for a prompt's KV."""
        shipment = self.shipments.get(job)
        if shipment is None or shipment.claim is not None:
            return True
        num_bytes = self._world.wire_bytes(job.rows)
        shipment.claim = self._host.claim(Tenant.WAITING, num_bytes, partial(self._pushed_out, shipment))
        return shipment.claim is not None

    def _pushed_out(self, shipment: SimulatedShipment) -> None:
        shipment.kept = False
        shipment.claim = None

    def _ship_layers(self, run: Pass) -> None:
        if self._dead:
            return
        for chunk in run.chunks:
            shipment = self.shipments.get(chunk.prompt.owner)
            if shipment is not None:
                size = self._chunk_bytes(chunk) * (self._world.layers - 1) // self._world.layers
                run.layers_sent[chunk.prompt.owner] = size
                shipment.made += size
                shipment.pump()
        layers = self._world.layers
        self._world.compute(run.cost.seconds * (layers - 1) / layers, partial(self._end, run))

    def _chunk_bytes(self, chunk: Chunk[Job]) -> int:
        """Bytes that a chunk seals and that leave with it, those of shared pages before it included. If rows are
        evicted, the last chunk seals all that stay."""
        end, of, rows = chunk.start + chunk.count, self._world.footprint, chunk.prompt.owner.rows
        first = 0 if chunk.start == chunk.prompt.cached_tokens else chunk.start
        if rows < chunk.prompt.num_tokens or (not first and chunk.is_last):
            return self._world.wire_bytes(rows) if chunk.is_last else 0
        due = of.sent_pages(chunk.prompt.num_tokens)
        pages = range(max(of.sealed(first), due.start), min(of.sealed(end), due.stop))
        return len(pages) * of.wire_page_bytes + (of.exact_rows(end) * of.row_bytes if chunk.is_last else 0)

    def _end(self, run: Pass) -> None:
        if self._dead:
            return
        self._pass = None
        self.scheduler.commit()
        now, tally = self._world.now, self.tally
        tokens = sum([chunk.count for chunk in run.chunks])
        tally.tokens += tokens
        tally.passes += 1
        took_s, alone_s = now - run.began, run.cost.seconds
        tally.busy_s += took_s
        quantize_s = run.cost.quantize_s * (took_s / alone_s if alone_s else 1.0)
        self._world.log.add(now, EventKind.PASS, self.number, tokens)
        if self._world.log.keep_spans:
            self._world.log.span(f"prefill-{self.number}", "pass", run.began, now, tokens)
        first: list[SimulatedShipment] = []
        for chunk in run.chunks:
            job = chunk.prompt.owner
            job.account.quantize_s += quantize_s
            shipment = self.shipments.get(job)
            if shipment is None:
                continue
            shipment.made += self._chunk_bytes(chunk) - run.layers_sent.get(job, 0)
            if chunk.is_last:
                job.account.cached_tokens = chunk.prompt.cached_tokens
                tally.cached_tokens += chunk.prompt.cached_tokens
                shipment.complete = True
                waits = Stage.SWAP_WAIT if shipment.receiver is None else Stage.TRANSFER
                job.times.enter(waits, now)
                first.append(shipment)
            shipment.pump()
        for shipment in first:
            self._world.log.add(now, EventKind.FIRST_TOKEN, self.number, shipment.job.number)
            self.on_first(shipment.job, shipment)
        self.wake()
