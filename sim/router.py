"""The router in simulated time: the live policy and line, and what a request does when a node is lost.

A request is booked on the prefill replica with the fewest queued tokens. If a decode replica has room it is booked
there at once, so that KV leaves while the prompt is computed; else the request stands in line and its prefill replica
keeps the KV (`router.fleet.line`). What the router believes of a decode replica's free pages is renewed whenever a
request comes to it or leaves it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_node.seats import Seat
from hackkv.errors import Overloaded, RequestError
from hackkv.timing import Stage
from router.fleet.line import Ageing, Demand, Ticket, next_in_line
from router.fleet.policy import Need, pages_for
from sim.decode import DecodeReplica
from sim.eventlog import Kind
from sim.jobs import Fate, Job
from sim.network import Link
from sim.placing import Shelf
from sim.prefill import PrefillReplica, Shipment
from sim.world import World


@dataclass(slots=True, eq=False)
class DecodeSite:
    """A decode replica with the links that lead to it."""

    replica: DecodeReplica
    links: tuple[Link, ...]


@dataclass(slots=True, eq=False)
class Ride:
    """A job and its places."""

    job: Job
    serial: int
    prefill: int | None = None
    shipment: Shipment | None = None
    decode: int | None = None
    seat: Seat[Job] | None = None
    booked: tuple[int, int] = (0, 0)
    """Tokens and pages on the decode replica's account."""
    queued: int = 0
    """Tokens on the prefill replica's account."""
    ticket: Ticket | None = None
    avoid: set[int] = field(default_factory=set)
    """Decode replicas that failed it."""

    @property
    def need(self) -> Need:
        """As `router.life.flight.Flight.need`."""
        prompt = self.job.prompt_tokens
        return Need(prompt + self.job.emitted, prompt + self.job.max_tokens)


class Router:
    """One router with its part of the fleet. `on_over` is called with every job that is done or has failed."""

    def __init__(
        self,
        world: World,
        prefills: list[PrefillReplica],
        decodes: list[DecodeSite],
        ageing: Ageing,
        max_failovers: int,
        largest: int,
    ) -> None:
        """`largest` is how many tokens of one request fit on every replica of the fleet."""
        self._world, self._ageing, self._max_failovers, self._largest = world, ageing, max_failovers, largest
        self.prefills, self.decodes = prefills, decodes
        self.prefill_shelf = Shelf(_names(len(prefills)), 0, world.footprint.page_tokens)
        pages = decodes[0].replica.pool.num_pages
        self.decode_shelf = Shelf(_names(len(decodes)), pages, world.footprint.page_tokens)
        self.on_over: Callable[[Job], None] = lambda _: None
        self._rides: dict[Job, Ride] = {}
        self._line: list[tuple[Ticket, Ride]] = []
        self._homeless: list[Ride] = []
        """Requests for which no prefill replica is up."""
        self._serial = 0
        for replica in prefills:
            replica.on_first = self._first
        for site in decodes:
            site.replica.on_ended = self._ended

    def arrive(self, job: Job) -> None:
        """Take a request."""
        self._serial += 1
        ride = self._rides[job] = Ride(job, self._serial)
        self._world.log.add(self._world.now, Kind.ARRIVED, -1, job.number)
        tokens = ride.need.whole
        if tokens > self._largest:
            self._fail(
                ride,
                f"{tokens} tokens need more pages or host memory than a replica has, which is room for {self._largest}",
            )
        else:
            self._dispatch(ride)

    @property
    def waiting(self) -> int:
        """Requests in line for a decode replica."""
        return len(self._line)

    # Prefill -----------------------------------------------------------------------------------------------------

    def _dispatch(self, ride: Ride) -> None:
        job, shelf = ride.job, self.prefill_shelf
        index = shelf.pick_prefill()
        if index is None:
            job.times.enter(Stage.ROUTER_QUEUE, self._world.now)
            self._homeless.append(ride)
            return
        shelf.choose(index)
        shelf.tokens[index] += job.prompt_tokens
        ride.prefill, ride.queued = index, job.prompt_tokens
        self._world.log.add(self._world.now, Kind.PLACED_PREFILL, self.prefills[index].number, job.number)
        if job.arrival.output_tokens > 1:
            self._stand_in_line(ride)
            if job.fate is not Fate.UNDER_WAY:
                return
        shipment = ride.shipment = self.prefills[index].join(job, self._landed)
        if ride.decode is not None:
            shipment.assign(_Links(self.decodes[ride.decode].links))

    def _first(self, job: Job, shipment: Shipment) -> None:
        """Token 0 is chosen: the prompt has left its queue."""
        ride = self._rides.get(job)
        if ride is None or ride.shipment is not shipment:
            return
        self._unqueue(ride)
        if job.first_at is None:
            job.first_at = self._world.now
            job.emitted = 1
        if job.left <= 0:
            self._over(ride)

    def _unqueue(self, ride: Ride) -> None:
        if ride.prefill is not None:
            self.prefill_shelf.tokens[ride.prefill] -= ride.queued
        ride.queued = 0

    # Room on a decode replica ------------------------------------------------------------------------------------

    def _stand_in_line(self, ride: Ride) -> None:
        demand = Demand(ride.need, ride.serial, frozenset(map(str, ride.avoid)))
        ride.ticket = Ticket(demand, self._world.now)
        insort(self._line, (ride.ticket, ride), key=lambda entry: entry[0].demand.serial)
        self.serve()

    def serve(self) -> None:
        """Give out the room that there is now, as `router.fleet.line.Line.serve`."""
        while self._line:
            tickets = [ticket for ticket, _ in self._line]
            index = next_in_line(tickets, self._fits, self._could_fit, self._world.now, self._ageing)
            if index is None:
                return
            for passed in tickets[:index]:
                passed.passed += 1
            ticket, ride = self._line.pop(index)
            ride.ticket = None
            self._open(ticket, ride)

    def _fits(self, demand: Demand) -> bool:
        return self._choose(demand) is not None

    def _could_fit(self, demand: Demand) -> bool:
        return self.decode_shelf.could_hold(demand.need)

    def _choose(self, demand: Demand) -> int | None:
        return self.decode_shelf.pick_decode(demand.need, frozenset(map(int, demand.avoid)))

    def _open(self, ticket: Ticket, ride: Ride) -> None:
        """Book the chosen replica and ask it for room. If it has none it counts as full, and the ride stays in line."""
        index = self._choose(ticket.demand)
        assert index is not None, "the line serves only who fits"
        job, replica, shelf = ride.job, self.decodes[index].replica, self.decode_shelf
        shelf.choose(index)
        try:
            seat = replica.admit(job)
        except Overloaded:
            self._world.log.add(self._world.now, Kind.REFUSED, replica.number, job.number)
            shelf.free[index] = 0
            ride.ticket = ticket
            insort(self._line, (ticket, ride), key=lambda entry: entry[0].demand.serial)
            return
        except RequestError as error:
            self._fail(ride, str(error))
            return
        need = ticket.demand.need
        ride.decode, ride.seat = index, seat
        ride.booked = need.whole, pages_for(need.landing, self._world.footprint.page_tokens)
        shelf.tokens[index] += need.whole
        self._report(index)
        self._world.log.add(self._world.now, Kind.PLACED_DECODE, replica.number, job.number)
        if ride.shipment is not None:
            ride.shipment.assign(_Links(self.decodes[index].links))

    def _report(self, index: int) -> None:
        self.decode_shelf.free[index] = self.decodes[index].replica.pool.free_pages

    def _landed(self, shipment: Shipment) -> None:
        ride = self._rides.get(shipment.job)
        if ride is None or ride.shipment is not shipment or ride.decode is None or ride.seat is None:
            return
        assert ride.prefill is not None
        self.prefills[ride.prefill].delivered(shipment)
        self.decodes[ride.decode].replica.land(ride.seat)

    # The end, and what may come before it --------------------------------------------------------------------------

    def _ended(self, job: Job) -> None:
        self._over(self._rides[job])

    def _over(self, ride: Ride, fate: Fate = Fate.DONE, error: str = "") -> None:
        job, now = ride.job, self._world.now
        job.times.enter(Stage.STREAM, now)
        job.ended_at, job.fate, job.error = now, fate, error
        del self._rides[job]
        if ride.ticket is not None:
            self._line = [(ticket, other) for ticket, other in self._line if other is not ride]
        self._unqueue(ride)
        if ride.shipment is not None and ride.prefill is not None:
            self.prefills[ride.prefill].leave(job)
            self.prefills[ride.prefill].wake()
        self._release_decode(ride)
        self._world.log.add(now, Kind.DONE if fate is Fate.DONE else Kind.FAILED, -1, job.number)
        self.on_over(job)
        self.serve()

    def _release_decode(self, ride: Ride) -> None:
        if ride.decode is None or ride.seat is None:
            return
        self.decode_shelf.tokens[ride.decode] -= ride.booked[0]
        self.decodes[ride.decode].replica.leave(ride.seat)
        self._report(ride.decode)
        ride.decode, ride.seat = None, None

    def _fail(self, ride: Ride, error: str) -> None:
        self._over(ride, Fate.FAILED, error)

    def decode_down(self, index: int) -> None:
        """A decode replica dies. Its requests go on elsewhere: with their KV if its prefill replica kept it."""
        if not self.decode_shelf.up[index]:
            return
        self.decode_shelf.up[index] = False
        self._world.log.add(self._world.now, Kind.DOWN, self.decodes[index].replica.number)
        self.decodes[index].replica.stop()
        hit = [ride for ride in self._rides.values() if ride.decode == index]
        for ride in hit:
            self.decode_shelf.tokens[index] -= ride.booked[0]
            ride.decode, ride.seat = None, None
            ride.avoid.add(index)
            if self._survives(ride):
                shipment = ride.shipment
                if shipment is not None and shipment.kept:
                    shipment.give_up()
                    if shipment.complete:
                        ride.job.times.enter(Stage.SWAP_WAIT, self._world.now)
                    self._stand_in_line(ride)
                else:
                    self._again(ride)

    def decode_up(self, index: int, replica: DecodeReplica) -> None:
        """A decode replica is back, empty."""
        site = self.decodes[index]
        site.replica = replica
        replica.on_ended = self._ended
        self.decode_shelf.up[index] = True
        self._report(index)
        self._world.log.add(self._world.now, Kind.UP, replica.number)
        self.serve()

    def prefill_down(self, index: int) -> None:
        """A prefill replica dies. Requests whose KV has landed do not notice; the others begin again."""
        if not self.prefill_shelf.up[index]:
            return
        self.prefill_shelf.up[index] = False
        self._world.log.add(self._world.now, Kind.DOWN, self.prefills[index].number)
        self.prefills[index].stop()
        for ride in [ride for ride in self._rides.values() if ride.prefill == index]:
            self._unqueue(ride)
            landed = ride.seat is not None and ride.seat.order > 0
            ride.shipment, ride.prefill = None, None
            if not landed and self._survives(ride):
                self._again(ride)

    def prefill_up(self, index: int, replica: PrefillReplica) -> None:
        """A prefill replica is back, empty."""
        self.prefills[index] = replica
        replica.on_first = self._first
        self.prefill_shelf.up[index] = True
        self._world.log.add(self._world.now, Kind.UP, replica.number)
        homeless, self._homeless = self._homeless, []
        for ride in homeless:
            self._dispatch(ride)

    def _survives(self, ride: Ride) -> bool:
        ride.job.account.failovers += 1
        if ride.job.account.failovers <= self._max_failovers:
            return True
        self._fail(ride, f"lost {ride.job.account.failovers} nodes")
        return False

    def _again(self, ride: Ride) -> None:
        """Begin the request again on other nodes; the client keeps what it has."""
        if ride.shipment is not None and ride.prefill is not None:
            self.prefills[ride.prefill].leave(ride.job)
        if ride.ticket is not None:
            self._line = [(ticket, other) for ticket, other in self._line if other is not ride]
            ride.ticket = None
        self._release_decode(ride)
        ride.shipment, ride.prefill = None, None
        self._dispatch(ride)


@dataclass(frozen=True, slots=True)
class _Links:
    links: tuple[Link, ...]


def _names(count: int) -> Sequence[str]:
    return [f"{index:06d}" for index in range(count)]
