"""Room for KV in simulated time: the router's line for decode replicas, and the room that each has given out.

The router's belief about a replica's free pages is renewed whenever a request comes to that replica or leaves it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_node.seats import Seat
from hackkv.errors import Overloaded, RequestError
from router.fleet.order import Ageing, Demand, Ticket, next_in_line
from router.fleet.policy import Need
from sim.aggregated import InterleavedPrompts
from sim.decode import DecodeReplica
from sim.eventlog import EventKind
from sim.jobs import Job
from sim.network import SharedLink
from sim.placing import Shelf
from sim.prefill import SimulatedShipment
from sim.racks import Uplink
from sim.world import World


@dataclass(slots=True, eq=False)
class DecodeSite:
    """A decode replica with the links that lead to it."""

    replica: DecodeReplica
    links: tuple[SharedLink, ...]
    prompts: InterleavedPrompts | None = None
    """Set if the replica computes prompts too."""
    uplink: Uplink | None = None
    """The uplink of the replica's rack."""


@dataclass(slots=True, eq=False)
class Ride:
    """A job with its places on replicas and in line."""

    job: Job
    serial: int
    whole: int
    """The most tokens that the job can have: prompt and answer."""
    prefill: int | None = None
    shipment: SimulatedShipment | None = None
    decode: int | None = None
    seat: Seat[Job] | None = None
    tokens: int = 0
    """Tokens on the decode replica's account."""
    queued: int = 0
    """Tokens on the prefill replica's account."""
    ticket: Ticket | None = None
    """Its place in line for a decode replica."""
    avoid: frozenset[int] = frozenset()
    """Decode replicas that failed this job."""

    @property
    def need(self) -> Need:
        """As `router.life.flight.Flight.need`."""
        return Need(self.job.arrival.prompt_tokens + self.job.emitted, self.whole)


class Rooms:
    """The decode replicas of one router. `on_room` is called with a ride that got room, `on_refused` with a ride that
    no replica can ever serve."""

    def __init__(self, world: World, sites: list[DecodeSite], ageing: Ageing) -> None:
        self._world, self._ageing, self.sites = world, ageing, sites
        pages = [site.replica.pool.num_pages for site in sites]
        self.shelf = Shelf(names(len(sites)), pages, world.footprint.page_tokens)
        self.on_room: Callable[[Ride], None] = lambda _: None
        self.on_refused: Callable[[Ride, str], None] = lambda _, __: None
        self._line: list[Ticket] = []
        self._standing: dict[int, Ride] = {}
        """Serial -> ride, for the rides that stand in line."""

    def __len__(self) -> int:
        """Requests in line."""
        return len(self._line)

    def stand(self, ride: Ride) -> None:
        """Get room now, or stand in line for it, as in `router.fleet.line.Line.wait`."""
        need = ride.need
        if not self._line:
            place = self._place(ride, need)
            if place is not None and self._open(ride, place):
                return
        self._join(ride, Ticket(Demand(need, ride.serial, frozenset(map(str, ride.avoid))), self._world.now))
        self.serve()

    def _join(self, ride: Ride, ticket: Ticket) -> None:
        ride.ticket = ticket
        self._standing[ride.serial] = ride
        insort(self._line, ticket, key=lambda ticket: ticket.demand.serial)

    def forget(self, ride: Ride) -> None:
        """Take a ride out of the line, if it stands there."""
        if ride.ticket is not None:
            self._line.remove(ride.ticket)
            del self._standing[ride.serial]
            ride.ticket = None

    def serve(self) -> None:
        """Give out the room that is free now, as in `router.fleet.line.Line.serve`."""
        if not self._line:
            return
        place: int | None = None

        def fits(demand: Demand) -> bool:
            nonlocal place
            place = self._place(self._standing[demand.serial], demand.need)
            return place is not None

        while self._line:
            index = next_in_line(self._line, fits, self._could_fit, self._world.now, self._ageing)
            if index is None:
                return
            for passed in self._line[:index]:
                passed.passed += 1
            ticket = self._line[index]
            ride = self._standing[ticket.demand.serial]
            self.forget(ride)
            assert place is not None
            if not self._open(ride, place):
                self._join(ride, ticket)

    def _place(self, ride: Ride, need: Need) -> int | None:
        """The replica that gets a ride; None if none has room."""
        job = ride.job
        held = [site.replica.held_tokens(job) for site in self.sites] if job.names else ()
        return self.shelf.pick_decode(need, ride.avoid, held)

    def release(self, ride: Ride) -> None:
        """Give a ride's room back, if it has any."""
        if ride.decode is not None and ride.seat is not None:
            self.shelf.book(ride.decode, -ride.tokens)
            self.sites[ride.decode].replica.leave(ride.seat)
            self._report(ride.decode)
            ride.decode, ride.seat = None, None

    def down(self, index: int) -> bool:
        """Let a replica die. Returns whether it was up."""
        if not self.shelf.up[index]:
            return False
        self.shelf.mark(index, up=False)
        self.shelf.book(index, -self.shelf.tokens[index])
        self._world.log.add(self._world.now, EventKind.DOWN, self.sites[index].replica.number)
        self.sites[index].replica.stop()
        return True

    def up(self, index: int, replica: DecodeReplica) -> None:
        """Put a new, empty replica in place of one that died."""
        self.sites[index].replica = replica
        self.shelf.mark(index, up=True)
        self._report(index)
        self._world.log.add(self._world.now, EventKind.UP, replica.number)
        self.serve()

    def _could_fit(self, demand: Demand) -> bool:
        return self.shelf.could_hold(demand.need)

    def _open(self, ride: Ride, index: int) -> bool:
        """Book a replica and ask it for room. If it has none it counts as full, and False says to stay in line."""
        job, replica, shelf = ride.job, self.sites[index].replica, self.shelf
        shelf.choose(index)
        try:
            seat = replica.admit(job)
        except Overloaded:
            self._world.log.add(self._world.now, EventKind.REFUSED, replica.number, job.number)
            shelf.free[index] = 0
            return False
        except RequestError as error:
            self.on_refused(ride, str(error))
            return True
        held = seat.held_grant.held * self._world.footprint.page_tokens
        ride.decode, ride.seat, ride.tokens = index, seat, ride.whole - held
        shelf.book(index, ride.tokens)
        self._report(index)
        self._world.log.add(self._world.now, EventKind.PLACED_DECODE, replica.number, job.number)
        self.on_room(ride)
        return True

    def _report(self, index: int) -> None:
        self.shelf.free[index] = self.sites[index].replica.pool.free_pages


def names(count: int) -> Sequence[str]:
    """`count` names of replicas, sorted."""
    return [f"{index:06d}" for index in range(count)]
