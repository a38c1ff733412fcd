"""One computation of a prompt, and as many decode nodes after it as it takes.

Two legs run side by side: the prefill leg brings token 0 and word of the handoff, the decode leg everything after.
Token 0 goes to the client without waiting for the other leg. The decode leg is opened first if a node has room, so
that pages can stream while the prompt is computed; if none has, prefill starts anyway, keeps the KV, and the decode
leg stands in line meanwhile.

    router_queue ──▶ prefill ──▶ swap_wait ──▶ transfer ──▶ decode_queue ──▶ decode
                        │        (no room)                                     │
                     token 0 ──▶ client                              tokens ──▶ client

When a decode node is lost and the prefill node still keeps the KV, the next decode leg gets it with a later epoch, and
the tokens that the client has. When the KV is gone too, the attempt has failed and `router.dispatch` makes another.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from uuid import uuid4

from hackkv.errors import NodeLost, Overloaded, TransferError
from hackkv.timing import Stage, SubStage
from hackkv.types import (
    Decoded,
    DecodeJob,
    HandoffFailed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Swapped,
    Token,
)
from router.decode_leg import DecodeLeg
from router.failover import Failovers, Failure, Kind, KvGone
from router.fleet import Fleet
from router.flight import Flight
from router.lifecycle import Stalled
from router.members import Booking
from router.prefill_leg import PrefillLeg
from router.scopes import unwrapped
from router.states import State
from transport.base import DecodeNode
from transport.closing import closing

_LATE_S = 0.1
"""How long a finished request waits for the prefill node's account of the handoff, which took another way round."""


class Attempt:
    """Afterwards, `to_avoid` names nodes that failed it, and `prefill_refused` says that prefill had no capacity."""

    def __init__(
        self, flight: Flight, fleet: Fleet, failovers: Failovers, to_avoid: frozenset[str] = frozenset()
    ) -> None:
        self._flight, self._fleet, self._failovers = flight, fleet, failovers
        self._transfer_id = uuid4().hex
        self._epoch = 0
        self._handoff = flight.request.sampling.max_tokens > 1
        self._decode: DecodeLeg | None = None
        self._decode_state = State.WAITING
        self._measured: dict[Stage, float] = {}
        self._handed_off = False
        self._told = asyncio.Event()
        self._complete = asyncio.Event()
        self._accounted = False
        self.to_avoid = set(to_avoid)
        self.prefill_refused = False

    async def run(self) -> None:
        """Serve the request to its end, or until the client wants no more. Raises what went wrong; leaves nothing."""
        flight = self._flight
        flight.clock.enter(Stage.ROUTER_QUEUE)
        flight.life.move(State.QUEUED)
        try:
            async with AsyncExitStack() as held:
                tokens = len(flight.request.prompt_ids)
                booking = held.enter_context(await self._fleet.book_prefill(tokens, flight.turn, self.to_avoid))
                flight.prefill_node = booking.member.node_id
                held.push_async_callback(self._close_decode)
                if self._handoff:
                    self._decode = await self._reserve_if_room()
                address = self._decode.booking.address if self._decode else ""
                job = PrefillJob(flight.request, self._transfer_id, self._epoch, address, self._handoff)
                with unwrapped():
                    await self._run_legs(PrefillLeg(booking, job))
        finally:
            # The workers' durations first; the rest is ours if all is told, else it belongs to where we were.
            rest = Stage.STREAM if self._accounted else flight.life.stage
            flight.clock.enter(Stage.STREAM, self._measured, rest=rest)

    async def _run_legs(self, prefill: PrefillLeg) -> None:
        flight = self._flight
        async with asyncio.TaskGroup() as tasks:
            flight.clock.enter(Stage.PREFILL)
            flight.life.move(State.PREFILLING)
            if flight.dispatched_s is None:
                flight.dispatched_s = flight.clock.total_s
            if self._decode is not None:
                self._decode_state = State.TRANSFERRING
            legs = [tasks.create_task(self._run_prefill(prefill))]
            if self._handoff:
                legs.append(tasks.create_task(self._run_decode(prefill)))
            await self._complete.wait()
            flight.life.move(State.STREAMING)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LATE_S):
                    await self._told.wait()
            for task in legs:
                task.cancel()
            await asyncio.wait(legs)

    # Prefill leg ----------------------------------------------------------------------------------------------------

    async def _run_prefill(self, prefill: PrefillLeg) -> None:
        """Raises when the request cannot go on with what this prefill node has; without harm once the KV has landed."""
        try:
            await prefill.booking.guard(self._read_prefill(prefill))
        except Overloaded:
            self.prefill_refused = True
            self.to_avoid.add(prefill.node_id)
            raise
        except (NodeLost, TransferError) as error:
            if not prefill.token0.is_set() or not self._delivered:
                if not isinstance(error, KvGone):
                    self.to_avoid.add(prefill.node_id)
                raise
        finally:
            prefill.kept = False
            self._told.set()

    async def _read_prefill(self, prefill: PrefillLeg) -> None:
        async with closing(prefill.events) as events:
            prefilled = await prefill.first()
            if not self._take_token0(prefilled):
                self._complete.set()
                return
            prefill.token0.set()
            self._enter(self._decode_state, prefill)
            async for fate in events:
                self._take_fate(fate)
        if not self._delivered:
            raise KvGone(f"prefill node {prefill.node_id} let go of KV that had not landed")

    @property
    def _delivered(self) -> bool:
        """The current decode node has the KV, by its own word or by the prefill node's."""
        return self._decode is not None and (self._decode.landed or self._handed_off)

    def _take_token0(self, prefilled: Prefilled) -> bool:
        """Credit prefill and hand token 0 on. False if the request ends with it."""
        flight = self._flight
        flight.clock.enter(
            Stage.TRANSFER,
            {Stage.PREFILL_QUEUE: prefilled.queue_s, Stage.PREFILL: prefilled.prefill_s},
            rest=Stage.STREAM,
        )
        flight.clock.sub_stages[SubStage.QUANTIZE] += prefilled.quantize_s
        flight.prefilled = prefilled
        wanted = flight.deliver(prefilled.token)
        self._accounted = not wanted or not self._handoff or prefilled.token.finish is not None
        return not self._accounted

    def _take_fate(self, fate: PrefillEvent) -> None:
        """Word of a push; that of a decode leg which is over comes too late to matter."""
        if isinstance(fate, Prefilled) or self._decode is None or fate.epoch != self._epoch:
            self._flight.strays[type(fate).__name__] += 1
        elif isinstance(fate, HandoffFailed):
            self._decode.undelivered(fate)
        else:
            self._measured[Stage.SWAP_WAIT] = self._measured.get(Stage.SWAP_WAIT, 0.0) + fate.swap_wait_s
            self._measured[Stage.TRANSFER] = fate.transfer_s
            self._handed_off = True
            self._told.set()

    # Decode legs ----------------------------------------------------------------------------------------------------

    async def _run_decode(self, prefill: PrefillLeg) -> None:
        while True:
            if self._decode is None:
                self._decode = await self._reserve_in_line()
                await self._offer(prefill, self._decode)
            self._flight.life.on_stall = self._decode.fail
            try:
                await self._decode.guard(self._receive(prefill, self._decode))
            except (NodeLost, TransferError, Stalled) as error:
                if not self._flight.complete:
                    await self._leave_decode(prefill, self._decode, error)
                    continue
            self._complete.set()
            return

    async def _offer(self, prefill: PrefillLeg, leg: DecodeLeg) -> None:
        self._enter(State.OFFERED, prefill)
        if self._epoch and prefill.token0.is_set():
            self._flight.clock.enter(Stage.TRANSFER)  # ends the window in which a lost decode node was replaced
        await prefill.assign(leg.job.epoch, leg.booking.address)
        self._enter(State.TRANSFERRING, prefill)

    async def _leave_decode(self, prefill: PrefillLeg, leg: DecodeLeg, error: Failure) -> None:
        """Give a decode node up and prepare for the next epoch. Raises `error` when the KV is gone too."""
        self.to_avoid.add(leg.node_id)
        if not prefill.kept:
            raise error
        self._failovers.survive(error, Kind.REASSIGNED)
        if prefill.token0.is_set():
            self._flight.clock.enter(Stage.SWAP_WAIT, self._measured, rest=self._flight.life.stage)
        self._measured.clear()
        self._handed_off = False
        self._told.clear()
        self._epoch += 1
        await self._close_decode()
        self._enter(State.WAITING, prefill)

    async def _receive(self, prefill: PrefillLeg, leg: DecodeLeg) -> None:
        """From the first page to the last token, or to the last one that the client wants."""
        flight = self._flight
        landed = await leg.land()
        flight.receipts.append(landed.receipt)
        flight.replayed += max(0, len(leg.job.emitted) - 1)  # the last one would have been the next input anyway
        self._enter(State.LANDED, prefill)
        await prefill.token0.wait()  # token 1 may overtake token 0, which comes from the other node
        finished = False
        async for event in leg.events:
            leg.booking.heard()
            if isinstance(event, Token):
                # A token that ends the request is followed by the node's account of its time, which we want.
                finished = event.finish is not None
                wanted = flight.deliver(event)
                self._enter(State.STREAMING if finished else State.DECODING, prefill)
                if not wanted and not finished:
                    return
            elif isinstance(event, Swapped):
                self._enter(State.SWAPPED, prefill)
            elif isinstance(event, Decoded) and finished:
                self._take_decoded(event)
                return
            else:
                flight.strays[type(event).__name__] += 1
        if not finished:
            raise NodeLost(f"decode node {leg.node_id} ended its stream before the last token")

    def _take_decoded(self, decoded: Decoded) -> None:
        self._measured[Stage.SWAP_WAIT] = self._measured.get(Stage.SWAP_WAIT, 0.0) + decoded.swapped_s
        self._measured[Stage.DECODE_QUEUE] = decoded.queue_s
        self._measured[Stage.DECODE] = decoded.decode_s
        self._flight.clock.sub_stages[SubStage.ATTEND] += decoded.attend_s
        self._flight.clock.sub_stages[SubStage.APPROXIMATION] += decoded.approximation_s
        self._accounted = True

    def _enter(self, state: State, prefill: PrefillLeg) -> None:
        """Where the decode side is now; that is where the request is, once it has left prefill."""
        self._decode_state = state
        if prefill.token0.is_set():
            self._flight.life.move(state)

    # Room -----------------------------------------------------------------------------------------------------------

    async def _reserve_if_room(self) -> DecodeLeg | None:
        flight = self._flight
        while booking := self._fleet.try_book_decode(
            flight.need, flight.turn, self.to_avoid, recovering=flight.recovering
        ):
            if leg := await self._open(booking):
                return leg
        return None

    async def _reserve_in_line(self) -> DecodeLeg:
        flight = self._flight
        while True:
            booking = await self._fleet.book_decode(
                flight.need, flight.turn, self.to_avoid, recovering=flight.recovering
            )
            if leg := await self._open(booking):
                return leg

    async def _open(self, booking: Booking[DecodeNode]) -> DecodeLeg | None:
        """Open the decode stream and wait until the node holds room; None if it has none, or is gone."""
        flight = self._flight
        leg = DecodeLeg(booking, DecodeJob(flight.request, self._transfer_id, self._epoch, tuple(flight.token_ids)))
        try:
            await leg.reserve()
        except Overloaded:
            await leg.close()
            return None
        except (NodeLost, TransferError) as error:
            await leg.close()
            self.to_avoid.add(leg.node_id)
            self._failovers.survive(error, Kind.REASSIGNED)
            return None
        except BaseException:
            await leg.close()
            raise
        flight.decode_node = leg.node_id
        return leg

    async def _close_decode(self) -> None:
        self._flight.life.on_stall = None
        if self._decode is not None:
            await self._decode.close()
            self._decode = None
