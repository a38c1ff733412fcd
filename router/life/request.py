"""The life of a request on one page: queue, prefill, room, transfer, decode, stream.

Two legs run side by side. The prefill leg brings token 0 and reports on the handoff, the decode leg brings the other
tokens. Token 0 goes to the client without waiting for the decode leg. The decode leg is opened first if a node has
room, so that pages can stream while the prompt is computed. If no node has room, prefill starts all the same and its
node keeps the KV while the decode leg stands in line. Read `serve`, then `Attempt` from the top.

    router_queue ──▶ prefill ──▶ swap_wait ──▶ transfer ──▶ decode_queue ──▶ decode
                        │        (no room)                                     │
                     token 0 ──▶ client                              tokens ──▶ client

When a decode node is lost and the prefill node still keeps the KV, the next decode leg gets the KV with a later epoch,
and the tokens that the client has. When the KV is gone too, the attempt has failed and `serve` makes another.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

from hackkv.errors import HackkvError, NodeLost, Overloaded, TransferError
from hackkv.held import NOTHING_HELD
from hackkv.types import PrefillJob, Role
from router.fleet.fleet import Fleet
from router.life.decode_leg import DecodeLeg
from router.life.failover import FAILURES, Failovers, Failure, KvGone, PrefillFull, Remedy
from router.life.flight import Flight
from router.life.news import News
from router.life.prefill_leg import PrefillLeg
from router.life.receivers import Receivers
from router.life.states import RequestState
from router.life.windows import AttemptWindows
from router.scopes import unwrapped
from transport.closing import closing

_LATE_S = 0.1
"""Seconds that a finished request waits for the prefill node's report of the handoff, which may come last."""


async def serve(flight: Flight, fleet: Fleet, failovers: Failovers) -> None:
    """Bring one sequence to its end: make attempts until one succeeds. Raises the failure that ends the request."""
    while True:
        try:
            await Attempt(flight, fleet, failovers).run()
            return
        except PrefillFull as error:
            prefill_nodes = frozenset(member.node_id for member in fleet.nodes.members(Role.PREFILL))
            await failovers.survive_refusal(error, prefill_nodes)
        except FAILURES as error:
            failovers.survive(error)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a failure that came first must not hide the cancellation
            raise asyncio.CancelledError


class Attempt:
    """One computation of a prompt, and the decode nodes that get its KV, one after another until one succeeds."""

    def __init__(self, flight: Flight, fleet: Fleet, failovers: Failovers) -> None:
        self._flight, self._fleet, self._failovers = flight, fleet, failovers
        self._life = flight.life
        self._has_handoff = flight.request.sampling.max_tokens > 1
        self._receivers = Receivers(flight, fleet.decode, failovers)
        self._windows = AttemptWindows(flight.clock, flight.life)
        self._news = News(flight, self._receivers, self._windows, self._has_handoff)

    async def run(self) -> None:
        """Serve the request to its end, or until the client wants no more. Raises what went wrong; keeps nothing."""
        with self._windows, unwrapped():
            async with AsyncExitStack() as held:
                prefill = await self._queue(held)
                async with asyncio.TaskGroup() as tasks:
                    legs = [tasks.create_task(self._run_prefill(prefill))]
                    if self._has_handoff:
                        legs.append(tasks.create_task(self._run_decode(prefill)))
                    await self._news.served.wait()
                    await self._stream(prefill)
                    for leg in legs:
                        leg.cancel()
                    await asyncio.wait(legs)

    # If all goes well -----------------------------------------------------------------------------------------------

    async def _queue(self, held: AsyncExitStack) -> PrefillLeg:
        """Queued: wait for a prefill node; take room on a decode node if there is some now. Then prefilling."""
        flight, receivers = self._flight, self._receivers
        self._life.move(RequestState.QUEUED)
        flight.marks = flight.marks or self._fleet.marks(flight.request.prompt_ids, flight.request.cache_salt)
        booking = held.enter_context(await self._fleet.prefill.book(flight.prefill_demand(self._failovers.avoid)))
        flight.route.prefill_node = booking.member.node_id
        held.push_async_callback(receivers.close)
        if self._has_handoff:
            await receivers.find_now()
        address = receivers.address_for(booking.member.info)
        there = receivers.current.held if receivers.current else NOTHING_HELD
        transfer_id, epoch = receivers.transfer_id, receivers.epoch
        job = PrefillJob(flight.request, transfer_id, epoch, address, self._has_handoff, there)
        self._windows.dispatched()
        self._life.move(RequestState.PREFILLING)
        if self._has_handoff:
            self._life.ahead(RequestState.TRANSFERRING if receivers.current else RequestState.WAITING)
        return PrefillLeg(booking, job)

    async def _read_prefill(self, prefill: PrefillLeg) -> None:
        """Prefilling: wait for token 0. After it, take the report of each push."""
        async with closing(prefill.events) as events:
            self._news.take_token0(await prefill.first())
            if self._news.served.is_set():
                return
            prefill.token0.set()
            async for event in events:
                self._news.take_fate(event)
        if not self._delivered:
            raise KvGone(f"prefill node {prefill.node_id} let go of KV that had not landed")

    async def _wait_for_room(self, prefill: PrefillLeg) -> DecodeLeg:
        """Waiting for room, then offered: stand in line for a decode node, and have the KV sent there."""
        leg = await self._receivers.find_in_line()
        self._life.ahead(RequestState.OFFERED)
        if leg.job.epoch and prefill.token0.is_set():
            self._windows.decode_replaced()
        address = leg.booking.kv_address(prefill.booking.member.info)
        await prefill.assign(leg.job.epoch, address, leg.held)
        self._life.ahead(RequestState.TRANSFERRING)
        return leg

    async def _read_decode(self, prefill: PrefillLeg, leg: DecodeLeg) -> None:
        """Transferring, landed, decoding: from the first page to the last token, or the last that the client wants."""
        self._news.take_landed(await leg.land(self._flight.marks), leg)
        await prefill.token0.wait()  # token 1 may overtake token 0, which comes from the other node
        await leg.each(self._news.take)
        if not self._flight.output.complete:
            raise NodeLost(f"decode node {leg.node_id} ended its stream before the last token")

    async def _stream(self, prefill: PrefillLeg) -> None:
        """Streaming: the client has every token. The prefill node's report of the handoff may still be on its way."""
        self._life.move(RequestState.STREAMING)
        leg = self._receivers.current
        if leg is not None:
            self._remember(leg)
        if leg is not None and prefill.kept:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LATE_S):
                    await leg.push_over.wait()

    def _remember(self, leg: DecodeLeg) -> None:
        """The next turn of a conversation may come before the decode node's report: expect the answer's pages there."""
        request = self._flight.request
        # The last token was chosen and never run.
        ids = (*request.prompt_ids, *self._flight.output.token_ids[:-1])
        leg.booking.will_hold(self._fleet.marks(ids, request.cache_salt))

    # If something goes wrong ----------------------------------------------------------------------------------------

    async def _run_prefill(self, prefill: PrefillLeg) -> None:
        """Read the prefill leg to its end. Raises when the request cannot go on with what this node has.

        Once the client has token 0 and the decode node has the KV, the loss of the prefill node does no harm.
        """
        try:
            await prefill.booking.guard(self._read_prefill(prefill))
        except Overloaded as error:
            self._failovers.avoid.add(prefill.node_id)
            raise PrefillFull(str(error), error.retry_after_s) from error
        except (NodeLost, TransferError) as error:
            has_kv = prefill.token0.is_set() and self._delivered
            if not has_kv and not self._flight.output.complete:
                if not isinstance(error, KvGone):
                    self._failovers.avoid.add(prefill.node_id)
                raise
        finally:
            prefill.kept = False
            if self._receivers.current is not None:
                self._receivers.current.push_over.set()

    async def _run_decode(self, prefill: PrefillLeg) -> None:
        """One decode node after another, until one has done its part. Raises when the KV is gone too."""
        try:
            while not self._news.served.is_set():
                leg = self._receivers.current or await self._wait_for_room(prefill)
                self._life.on_stall = leg.fail
                try:
                    await leg.guard(self._read_decode(prefill, leg))
                    self._news.served.set()
                except FAILURES as error:
                    if self._flight.output.complete:
                        raise
                    await self._leave(prefill, leg, error)
        except HackkvError:
            if not self._flight.output.complete:
                raise
            self._news.served.set()  # the output is complete: a later failure does not concern the client

    async def _leave(self, prefill: PrefillLeg, leg: DecodeLeg, error: Failure) -> None:
        """Give a decode node up and prepare for the next epoch. Raises `error` when the KV is gone too."""
        self._failovers.avoid.add(leg.node_id)
        if not prefill.kept:
            raise error
        self._failovers.survive(error, Remedy.REASSIGNED)
        if prefill.token0.is_set():
            self._windows.decode_lost()
        self._windows.forget()
        await self._receivers.leave()
        self._life.ahead(RequestState.WAITING)

    @property
    def _delivered(self) -> bool:
        """Whether the current decode node has the KV, as it says itself or as the prefill node says."""
        return self._receivers.current is not None and self._receivers.current.delivered
