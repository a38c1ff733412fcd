"""The router in simulated time: the live policy and line, and what a request does when a node is lost.

A request is booked on the prefill replica with the fewest queued tokens. If a decode replica has room, the request is
booked there at once, so that KV leaves while the prompt is computed. Else the request stands in line (`sim.rooms`), and
its prefill replica keeps the KV.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hackkv.timing import Stage
from sim.decode import DecodeReplica
from sim.eventlog import EventKind
from sim.jobs import Fate, Job
from sim.placing import Shelf
from sim.prefill import PrefillReplica, SimulatedShipment
from sim.rooms import Ride, Rooms, names
from sim.spec import Spec
from sim.world import World


class Router:
    """One router with its part of the fleet. `on_over` is called with every job that is done or has failed."""

    def __init__(self, world: World, prefills: list[PrefillReplica], rooms: Rooms, spec: Spec, largest: int) -> None:
        """`largest` is how many tokens one request may have (`sim.capacity.largest_request`)."""
        self._world, self._largest = world, largest
        self._max_failovers, self._network = spec.policy.max_failovers, spec.network
        self.prefills, self.rooms = prefills, rooms
        self.shelf = Shelf(names(len(prefills)), [0] * len(prefills), world.footprint.page_tokens)
        self.on_over: Callable[[Job], None] = lambda _: None
        self._rides: dict[Job, Ride] = {}
        self._homeless: list[Ride] = []
        """Requests for which no prefill replica is up."""
        self._serial = 0
        rooms.on_room, rooms.on_refused = self._has_room, self._fail
        for replica in prefills:
            replica.on_first = self._first
        for site in rooms.sites:
            site.replica.on_ended = self._ended
            if site.prompts is not None:
                site.prompts.on_complete = self._complete

    def _work(self, seconds: float, call: Callable[[Ride], None], ride: Ride) -> None:
        """Call `call` with a request after the router has worked on it for `seconds`."""
        if seconds <= 0:
            call(ride)
        elif self._world.cores is None:
            self._world.after(seconds, partial(call, ride))
        else:
            self._world.cores.serve(seconds, partial(call, ride))

    def arrive(self, job: Job) -> None:
        """Take a request."""
        self._serial += 1
        prompt = job.arrival.prompt_tokens
        tokens = prompt + job.max_tokens
        ride = self._rides[job] = Ride(job, self._serial, tokens)
        self._world.log.add(self._world.now, EventKind.ARRIVED, -1, job.number)
        if tokens > self._largest:
            self._fail(ride, f"{tokens} tokens need more pages or host memory than a replica has for {self._largest}")
        else:
            of = self._network
            self._work(of.request_s + prompt * of.request_token_s, self._accepted, ride)

    def _accepted(self, ride: Ride) -> None:
        if not self.prefills:
            self.rooms.stand(ride)
            return
        ride.job.times.enter(Stage.STREAM, self._world.now)
        self._work(self._network.call_s, self._dispatch, ride)

    # The usual course --------------------------------------------------------------------------------------------

    def _dispatch(self, ride: Ride) -> None:
        job = ride.job
        held = [replica.held_tokens(job) for replica in self.prefills] if job.names else []
        index = self.shelf.pick_prefill(held=held)
        if index is None:
            job.times.enter(Stage.ROUTER_QUEUE, self._world.now)
            self._homeless.append(ride)
            return
        ride.prefill, ride.queued = index, job.arrival.prompt_tokens - (held[index] if held else 0)
        self.shelf.choose(index, ride.queued)
        self._world.log.add(self._world.now, EventKind.PLACED_PREFILL, self.prefills[index].number, job.number)
        if job.arrival.output_tokens > 1:
            self.rooms.stand(ride)
            if job.fate is not Fate.UNDER_WAY:
                return
        ride.shipment = self.prefills[index].join(job, self._landed)
        if ride.decode is not None:
            self._has_room(ride)

    def _has_room(self, ride: Ride) -> None:
        assert ride.decode is not None
        site = self.rooms.sites[ride.decode]
        if ride.shipment is not None:
            ride.shipment.assign(site, 0 if ride.seat is None else ride.seat.held_grant.held)
        elif site.prompts is not None:
            site.prompts.join(ride.job)
            site.replica.wake()

    def _complete(self, job: Job) -> None:
        """A replica that does both roles has computed a prompt. The KV is already where decoding needs it."""
        ride = self._rides[job]
        job.first_at = self._world.now
        job.left -= 1
        if job.left <= 0:
            self._over(ride)
        elif ride.decode is not None and ride.seat is not None:
            self.rooms.sites[ride.decode].replica.land(ride.seat)

    def _first(self, job: Job, shipment: SimulatedShipment) -> None:
        """Token 0 is chosen: the prompt has left its queue."""
        ride = self._rides.get(job)
        if ride is None or ride.shipment is not shipment:
            return
        self._unqueue(ride)
        if job.first_at is None:
            job.first_at = self._world.now
            job.left -= 1
        if job.left <= 0:
            self._over(ride)

    def _landed(self, shipment: SimulatedShipment) -> None:
        ride = self._rides.get(shipment.job)
        if ride is None or ride.shipment is not shipment or ride.decode is None or ride.seat is None:
            return
        assert ride.prefill is not None
        self.prefills[ride.prefill].delivered(shipment)
        self.rooms.sites[ride.decode].replica.land(ride.seat)

    def _unqueue(self, ride: Ride) -> None:
        if ride.prefill is not None and ride.queued:
            self.shelf.book(ride.prefill, -ride.queued)
        ride.queued = 0

    # The end -----------------------------------------------------------------------------------------------------

    def _ended(self, job: Job) -> None:
        self._over(self._rides[job])

    def _fail(self, ride: Ride, error: str) -> None:
        self._over(ride, Fate.FAILED, error)

    def _over(self, ride: Ride, fate: Fate = Fate.DONE, error: str = "") -> None:
        job, now = ride.job, self._world.now
        job.times.enter(Stage.STREAM, now)
        job.ended_at, job.fate, job.error = now, fate, error
        del self._rides[job]
        self._let_go(ride)
        self._world.log.add(now, EventKind.DONE if fate is Fate.DONE else EventKind.FAILED, -1, job.number)
        self.on_over(job)
        self.rooms.serve()

    def _let_go(self, ride: Ride) -> None:
        """Give back everything that a ride holds."""
        self.rooms.forget(ride)
        self._unqueue(ride)
        if ride.shipment is not None and ride.prefill is not None:
            self.prefills[ride.prefill].leave(ride.job)
        self.rooms.release(ride)
        ride.shipment, ride.prefill = None, None

    # Losses of nodes ---------------------------------------------------------------------------------------------

    def decode_down(self, index: int) -> None:
        """A decode replica dies. Its requests go on elsewhere, with their KV if their prefill replica kept it."""
        if not self.rooms.down(index):
            return
        for ride in [ride for ride in self._rides.values() if ride.decode == index]:
            ride.decode, ride.seat = None, None
            ride.avoid |= {index}
            shipment = ride.shipment
            if not self._survives(ride):
                continue
            if shipment is not None and shipment.kept:
                shipment.give_up()
                if shipment.complete:
                    ride.job.times.enter(Stage.SWAP_WAIT, self._world.now)
                self.rooms.stand(ride)
            else:
                self._again(ride)

    def decode_up(self, index: int, replica: DecodeReplica) -> None:
        """A decode replica is back, empty."""
        replica.on_ended = self._ended
        self.rooms.up(index, replica)

    def prefill_down(self, index: int) -> None:
        """A prefill replica dies. Requests whose KV has landed are not affected; the others begin again."""
        if not self.shelf.up[index]:
            return
        self.shelf.mark(index, up=False)
        self._world.log.add(self._world.now, EventKind.DOWN, self.prefills[index].number)
        self.prefills[index].stop()
        for ride in [ride for ride in self._rides.values() if ride.prefill == index]:
            self._unqueue(ride)
            ride.shipment, ride.prefill = None, None
            landed = ride.seat is not None and ride.seat.order > 0
            if not landed and self._survives(ride):
                self._again(ride)

    def prefill_up(self, index: int, replica: PrefillReplica) -> None:
        """A prefill replica is back, empty."""
        self.prefills[index] = replica
        replica.on_first = self._first
        self.shelf.mark(index, up=True)
        self._world.log.add(self._world.now, EventKind.UP, replica.number)
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
        """Begin the request again on other nodes; the client keeps its tokens."""
        self._let_go(ride)
        self._dispatch(ride)
