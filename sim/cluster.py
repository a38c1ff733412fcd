"""A simulated cluster: built from its specification, and run until all requests are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from struct import pack

from decode_node.pages import PagePool
from decode_node.scheduler import DecodeScheduler, SchedulerLimits
from hackkv.errors import ConfigError
from hackkv.page_names import PageName
from prefill_node.host_pool import HostPool
from prefill_node.prefix_pool import PrefixPool
from prefill_node.scheduler import PrefillScheduler
from router.fleet.order import Ageing
from sim.aggregated import InterleavedPrompts
from sim.books import CountedPages, CountedPrefixes
from sim.capacity import GBIT, cost_of, flow_of, host_bytes_of, largest_request, line_of, pages_of
from sim.costs import CostModel
from sim.decode import DecodeReplica, Setting
from sim.eventlog import EventLog
from sim.faults import Faults
from sim.host import HostCores
from sim.jobs import Arrival, Job, StageTimes
from sim.network import Network, SharedLink
from sim.network_spec import Sending
from sim.prefill import KvDispatch, PrefillReplica
from sim.racks import Place, Uplink, uplinks_of
from sim.results import RequestTable, SimulationRecord
from sim.rooms import DecodeSite, Rooms
from sim.router import Router
from sim.scaled import noisy
from sim.scaling import TICK_S, Kind, Staff, staff_of
from sim.sizes import CodecSizes, sizes_of
from sim.spec import ReplicaPool, Spec
from sim.world import World
from sim.worth import TypicalRequest, goodput


def _heard(_: int) -> None:
    """The default listener, which does nothing. It is a function, since options travel to other processes."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a simulation; the specification says what to run."""

    seed: int = 0
    macro: bool = True
    keep_spans: bool = False
    on_over: Callable[[int], None] = _heard
    """Called with the number of requests that are over."""


@dataclass(slots=True, eq=False)
class SimulationOutcome:
    """Results of a simulation, with its replicas in their final state."""

    spec: Spec
    rows: RequestTable
    log: EventLog
    duration_s: float
    prefills: list[PrefillReplica]
    decodes: list[DecodeReplica]
    network: Network
    links: list[SharedLink]
    paid_s: dict[str, float]
    """See `SimulationRecord`."""
    jobs: list[Job] = field(default_factory=list)
    """Every job with its stages; only if spans are kept."""

    @property
    def record(self) -> SimulationRecord:
        """The part of the outcome that does not need the replicas."""
        return SimulationRecord(
            self.spec,
            self.rows,
            self.log.hexdigest,
            self.log.counts,
            [replica.tally for replica in self.prefills],
            [replica.tally for replica in self.decodes],
            [link.carried / link.rate for link in self.links],
            self.paid_s,
            self.log.spans,
            self.jobs,
        )


@dataclass(slots=True)
class Layout:
    """The pool of each replica, and the rack in which it stands."""

    kinds: dict[str, list[int]]
    """Role -> for each replica, by number, the index of its pool among the role's pools."""
    uplinks: dict[Place, Uplink] = field(default_factory=dict)
    """The uplink of each replica's rack; empty without racks."""


class Cluster:
    """One simulation: `run` may be called once."""

    def __init__(
        self,
        spec: Spec,
        options: Options | None = None,
        costs: Callable[[Spec, ReplicaPool, CodecSizes], CostModel] = cost_of,
    ) -> None:
        """`costs` makes the cost model of a pool. Raises `ConfigError` if the specification cannot be built."""
        self.spec, self._options, self._costs = spec, options or Options(), costs
        self.sizes = sizes_of(spec.codec, spec.shape.kv_shape)
        faults = Faults(spec.faults)
        scaled = any(pool.scale for pool in spec.pools)
        if spec.faults.rules and (not spec.prefill or scaled):
            raise ConfigError("faults: an aggregated cluster, and one that scales, are simulated without them")
        if spec.faults.rules and spec.host is not None:
            raise ConfigError("faults: a cluster that shares a host is simulated without them")
        macro = self._options.macro and not faults.at_tokens and spec.host is None
        log = EventLog(self._options.keep_spans)
        self.world = World(self.sizes.footprint, spec.shape.layers, macro, log)
        if spec.host is not None:
            self.world.share(HostCores(self.world, spec.host))
        self._network = Network(self.world, spec.network.sharing)
        self._links: list[SharedLink] = []
        self._reuse = False
        self._faults = faults
        self._layout = Layout({role: _kinds(pools) for role, pools in spec.roles.items()})
        self.routers: list[Router] = []
        self._staff: list[dict[str, Staff]] = []
        """Role -> controller, one dictionary for each router."""

    def run(self, arrivals: Sequence[Arrival], shard: int | None = None) -> SimulationOutcome:
        """Serve requests. Requests that cannot end, because no replica is left to serve them, count as failed.

        With `shard`, the cluster is one router with its replicas, and `arrivals` are those of that router: every n-th
        of all.
        """
        shards = self.spec.policy.shards
        mine = range(shards) if shard is None else range(shard, shard + 1)
        numbers = range(mine[0], mine[0] + len(arrivals) * (shards // len(mine)), shards // len(mine))
        can_reuse = bool(self.spec.prefill) and self.sizes.bytes_follow_tokens
        self._reuse = can_reuse and any(arrival.blocks for arrival in arrivals)
        self._build(mine, arrivals)
        rows, jobs = RequestTable(numbers), list[Job]()
        concurrency, keep_spans = self.spec.load.concurrency, self._options.keep_spans
        todo = iter(zip(numbers, arrivals, strict=True))
        over_count = 0

        def begin(number: int, arrival: Arrival) -> None:
            now = self.world.now
            times, held = StageTimes(now, keep_marks=keep_spans), self.sizes.rows_held(arrival.prompt_tokens)
            names = self._names(arrival) if self._reuse else ()
            job = Job(number, arrival, now, times, held, arrival.output_tokens, names)
            if keep_spans:
                jobs.append(job)
            self.routers[number % len(self.routers)].arrive(job)

        def begin_next() -> None:
            item = next(todo, None)
            if item is None:
                return
            number, arrival = item
            if concurrency:
                begin(number, arrival)
            else:
                self.world.after(arrival.at_s - self.world.now, partial(arrive, number, arrival))

        def arrive(number: int, arrival: Arrival) -> None:
            begin_next()
            begin(number, arrival)

        def over(job: Job) -> None:
            nonlocal over_count
            rows.add(job)
            over_count += 1
            self._options.on_over(over_count)
            if concurrency:
                self.world.after(0.0, begin_next)

        for router in self.routers:
            router.on_over = over
        for _ in range(min(concurrency, len(arrivals)) or 1):
            begin_next()
        self._tick()
        self.world.run()
        staff = self._staff[0]
        return SimulationOutcome(
            self.spec,
            rows,
            self.world.log,
            self.world.now,
            [replica for router in self.routers for replica in router.prefills],
            [site.replica for router in self.routers for site in router.rooms.sites],
            self._network,
            self._links,
            {key: sum(one[role].paid_s[key] for one in self._staff) for role in staff for key in staff[role].paid_s},
            jobs,
        )

    def _tick(self) -> None:
        """Let every controller act, and call this method again until the simulation is over."""
        if not any(self._staff):
            return
        for staff in self._staff:
            for one in staff.values():
                one.tick()
        if not self.world.is_over:
            self.world.after(TICK_S, self._tick)

    # Parts ---------------------------------------------------------------------------------------------------------

    def _build(self, mine: range, arrivals: Sequence[Arrival]) -> None:
        spec, shards = self.spec, self.spec.policy.shards
        ageing = Ageing(spec.policy.ageing_s, spec.policy.max_passed)
        largest = largest_request(spec, self.sizes)
        for shard in mine:
            numbers = {role: self._numbers(role)[shard::shards] for role in ("prefill", "decode")}
            own = {
                role: [(n, pools[self._layout.kinds[role][n]]) for n in numbers[role]]
                for role, pools in spec.roles.items()
            }
            self._layout.uplinks |= uplinks_of(spec, own, self._link)
            prefills = [self._prefill(number) for number in numbers["prefill"]]
            decodes = [self._site(number) for number in numbers["decode"]]
            rooms = Rooms(self.world, decodes, ageing)
            router = Router(self.world, prefills, rooms, spec, largest)
            self.routers.append(router)
            self._faults.watch(router, self._prefill, self._decode, self.world)
            own_arrivals = arrivals if len(mine) == 1 else arrivals[shard::shards]
            self._staff.append(staff_of(self.world, router, self._kinds_of(own_arrivals)))

    def _prefill(self, number: int) -> PrefillReplica:
        spec, kind, footprint = self.spec, self._layout.kinds["prefill"][number], self.sizes.footprint
        pool = spec.prefill[kind]
        host = HostPool(host_bytes_of(spec, pool), lambda _: replica.wake())
        pages = pages_of(spec, pool, self.sizes)
        of_page = (footprint.page_tokens, host, footprint.page_bytes)
        prefixes = PrefixPool if self._reuse else CountedPrefixes
        book = prefixes(pages, pool.max_sequences, *of_page)
        scheduler: PrefillScheduler[Job] = PrefillScheduler(book, pool.chunk_tokens)
        line = self._link(f"prefill-{number:06d}", self._faults.slowed(f"prefill-{number}", line_of(spec, pool)))
        sender = KvDispatch(
            self.world,
            self._network,
            line,
            flow_of(spec, pool),
            spec.efficiency_of(pool).setup_s,
            0.0 if spec.host is None else spec.host.byte_s,
            spec.network.sending is Sending.LAYERS and self.sizes.eviction is None,
            spec.network.blocking,
            self._layout.uplinks.get(("prefill", number)),
        )
        replica = PrefillReplica(self.world, number, self._cost(pool, number, "prefill"), scheduler, host, sender)
        replica.tally.kind = kind
        return replica

    def _site(self, number: int) -> DecodeSite:
        pool, prompts = self.spec.decode[self._layout.kinds["decode"][number]], None
        if not self.spec.prefill:
            cost = self._cost(pool, number, "prompts")
            prompts = InterleavedPrompts(self.world, number, cost, pool.chunk_tokens, pool.max_sequences)
        return DecodeSite(
            self._decode(number, prompts),
            self._receiving(pool, number),
            prompts,
            self._layout.uplinks.get(("decode", number)),
        )

    def _decode(self, number: int, beside: InterleavedPrompts | None = None) -> DecodeReplica:
        spec, kind = self.spec, self._layout.kinds["decode"][number]
        pool = spec.decode[kind]
        pages = pages_of(spec, pool, self.sizes)
        book = (PagePool if self._reuse else CountedPages)(pages, pool.max_sequences)
        limits = SchedulerLimits(host_bytes_of(spec, pool), pool.max_batch, pool.replay_tokens)
        scheduler: DecodeScheduler[Job] = DecodeScheduler(book, self.sizes.footprint, limits)
        setting = Setting(self.world, self._cost(pool, number, "decode"), pool.max_batch, beside)
        replica = DecodeReplica(number, setting, scheduler, book)
        replica.tally.kind = kind
        return replica

    def _kinds_of(self, arrivals: Sequence[Arrival]) -> dict[str, list[Kind]]:
        """The kinds of replicas of each role that scales. Their worth is that for the mean of `arrivals`."""
        spec, sizes, found = self.spec, self.sizes, dict[str, list[Kind]]()
        for role, pools in spec.roles.items():
            if not any(pool.scale for pool in pools):
                continue
            request = TypicalRequest.of(arrivals)
            for index, pool in enumerate(pools):
                served = goodput(spec, role, pool, sizes, self._costs(spec, pool, sizes), request)
                kind = Kind(spec.key_of(role, index), pool.scale, served, spec.usd_of(pool) / served)
                found.setdefault(role, []).append(kind)
        return found

    def _numbers(self, role: str) -> range:
        """Numbers of the replicas of a role. Routers take them in turn, so each gets its part of every kind."""
        return range(len(self._layout.kinds.get(role, ())))

    def _cost(self, pool: ReplicaPool, number: int, role: str) -> CostModel:
        cost = self._costs(self.spec, pool, self.sizes)
        return noisy(cost, self.spec.noise, f"{self._options.seed}/{role}-{number}") if self.spec.noise else cost

    def _receiving(self, pool: ReplicaPool, number: int) -> tuple[SharedLink, ...]:
        spec = self.spec
        links = [self._link(f"decode-{number:06d}", line_of(spec, pool))]
        if spec.network.receiver_gbit_s:
            links.append(self._link(f"receiver-{number:06d}", spec.network.receiver_gbit_s * GBIT))
        return tuple(links)

    def _link(self, name: str, rate: float) -> SharedLink:
        link = SharedLink(name, rate)
        self._links.append(link)
        return link

    def _names(self, arrival: Arrival) -> Sequence[PageName]:
        page = self.sizes.footprint.page_tokens
        full = arrival.prompt_tokens // page
        return tuple(
            _name(arrival.blocks[index * page // arrival.block_tokens], index)
            for index in range(min(full, len(arrival.blocks) * arrival.block_tokens // page))
        )


@cache
def _name(block: int, index: int) -> PageName:
    return PageName(pack("<qq", block, index), b"", "")


def _kinds(pools: Sequence[ReplicaPool]) -> list[int]:
    return [kind for kind, pool in enumerate(pools) for _ in range(pool.replicas)]
