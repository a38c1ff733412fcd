"""One try at a request on one pair of nodes.

Two legs run side by side: the prefill leg brings token 0 and word of the handoff, the decode leg everything after.
Token 0 goes to the client without waiting for the other leg. The decode leg is opened first if a node has room, so
that pages can stream while the prompt is computed; if none has, prefill starts anyway, keeps the KV, and the decode
leg stands in line meanwhile.

    router_queue ──▶ prefill ──▶ swap_wait ──▶ transfer ──▶ decode_queue ──▶ decode
                        │        (no room)                                     │
                     token 0 ──▶ client                              tokens ──▶ client
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from hackkv.errors import HandshakeRefused, NodeLost, Overloaded, TransferError
from hackkv.timing import Stage, SubStage
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    HandedOff,
    Landed,
    Prefilled,
    PrefillJob,
    Reserved,
    Swapped,
    Token,
)
from router.fleet import Fleet
from router.flight import Flight
from router.members import Booking, Member
from router.scopes import deadline, unwrapped
from transport.base import DecodeNode, PrefillNode
from transport.closing import closing

_LATE_S = 0.1
"""How long a finished request waits for the prefill node's account of the handoff, which took another way round."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request may stay in one state, in seconds."""

    queue_s: float = 120.0
    prefill_s: float = 300.0
    transfer_s: float = 60.0
    token_s: float = 60.0
    total_s: float = 1800.0


EventT = TypeVar("EventT")


async def _expect(events: AsyncIterator[object], kind: type[EventT], who: str) -> EventT:
    """The next event, which must be a `kind`. Raises `NodeLost` if the stream ends or breaks the protocol."""
    async for event in events:
        if isinstance(event, kind):
            return event
        raise NodeLost(f"{who} sent {type(event).__name__} where {kind.__name__} was due")
    raise NodeLost(f"{who} ended its stream before {kind.__name__}")


class _DecodeLeg:
    """An open decode stream and the pages booked for it."""

    def __init__(self, booking: Booking[DecodeNode], events: AsyncIterator[DecodeEvent]) -> None:
        self.booking, self.events = booking, events


class Attempt:
    """One try. Afterwards, `nodes` says who took part and `prefill_refused` whether prefill had no capacity."""

    def __init__(
        self, flight: Flight, fleet: Fleet, deadlines: Deadlines, epoch: int, avoid: frozenset[str] = frozenset()
    ) -> None:
        self._flight, self._fleet, self._deadlines = flight, fleet, deadlines
        self._epoch, self._avoid = epoch, avoid
        self._transfer_id = uuid4().hex
        self._kv_tokens = len(flight.request.prompt_ids) + flight.request.sampling.max_tokens
        self._handoff = flight.request.sampling.max_tokens > 1
        self._measured: dict[Stage, float] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._token0 = asyncio.Event()
        self._landed = asyncio.Event()
        self._complete = asyncio.Event()
        self._transfer_limit: asyncio.Timeout | None = None
        self._dispatched = self._assigned = self._decoding = self._accounted = False
        self.nodes: set[str] = set()
        self.prefill_refused = False

    @property
    def stage(self) -> Stage:
        """Where the request is now."""
        if not self._dispatched:
            return Stage.ROUTER_QUEUE
        if not self._token0.is_set():
            return Stage.PREFILL
        if self._landed.is_set():
            return Stage.DECODE if self._decoding else Stage.DECODE_QUEUE
        return Stage.TRANSFER if self._assigned else Stage.SWAP_WAIT

    async def run(self) -> None:
        """Serve the request to its end, or until the client wants no more. Raises what went wrong; leaves nothing."""
        clock = self._flight.clock
        clock.enter(Stage.ROUTER_QUEUE)
        try:
            async with AsyncExitStack() as held:
                leg = await self._reserve_if_room(held) if self._handoff else None
                prefill = held.enter_context(
                    self._fleet.book_prefill(len(self._flight.request.prompt_ids), self._avoid)
                )
                self._flight.prefill_node = prefill.member.node_id
                self.nodes.add(prefill.member.node_id)
                with unwrapped():
                    await self._run_legs(held, prefill, leg)
        finally:
            # The workers' durations first; the rest is ours if all is told, else it belongs to where we were.
            clock.enter(Stage.STREAM, self._measured, rest=Stage.STREAM if self._accounted else self.stage)

    async def _run_legs(self, held: AsyncExitStack, prefill: Booking[PrefillNode], leg: _DecodeLeg | None) -> None:
        flight = self._flight
        async with asyncio.TaskGroup() as tasks:
            self._watch(tasks, prefill.member)
            if leg is not None:
                self._watch(tasks, leg.booking.member)
            self._assigned = leg is not None
            flight.clock.enter(Stage.PREFILL)
            self._dispatched = True
            if flight.dispatched_s is None:
                flight.dispatched_s = flight.clock.total_s
            legs = [tasks.create_task(self._run_prefill(prefill, leg.booking.address if leg else ""))]
            if self._handoff:
                legs.append(tasks.create_task(self._run_decode(tasks, held, prefill, leg)))
            await self._complete.wait()
            await asyncio.wait(legs[:1], timeout=_LATE_S)
            rest = [*legs, *self._watchers]
            for task in rest:
                task.cancel()
            await asyncio.wait(rest)

    # Prefill leg ----------------------------------------------------------------------------------------------------

    async def _run_prefill(self, booking: Booking[PrefillNode], address: str) -> None:
        job = PrefillJob(self._flight.request, self._transfer_id, self._epoch, address, self._handoff)
        who = f"prefill node {booking.member.node_id}"
        async with closing(booking.node.prefill(job)) as events:
            try:
                async with deadline(self._deadlines.prefill_s, "prefill"):
                    prefilled = await _expect(events, Prefilled, who)
            except NodeLost:
                booking.failed()
                raise
            except Overloaded:
                self.prefill_refused = True
                raise
            booking.worked()
            booking.release()  # the queue is shorter now, whatever becomes of the handoff
            if not self._take_token0(prefilled):
                self._complete.set()
                return
            try:
                self._take_handoff(await _expect(events, HandedOff, who))
            except (NodeLost, TransferError):
                if not self._landed.is_set():
                    raise
                # The decode node has the KV: this prefill node is not needed any more.

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
        self._token0.set()
        wanted = flight.deliver(prefilled.token)
        if not wanted or not self._handoff or prefilled.token.finish is not None:
            self._accounted = True
            return False
        self._arm_transfer_limit()
        return True

    def _take_handoff(self, handed_off: HandedOff) -> None:
        self._measured[Stage.SWAP_WAIT] = handed_off.swap_wait_s
        self._measured[Stage.TRANSFER] = handed_off.transfer_s

    # Decode leg -----------------------------------------------------------------------------------------------------

    async def _run_decode(
        self,
        tasks: asyncio.TaskGroup,
        held: AsyncExitStack,
        prefill: Booking[PrefillNode],
        leg: _DecodeLeg | None,
    ) -> None:
        if leg is None:
            async with deadline(self._deadlines.queue_s, "waiting for decode capacity"):
                leg = await self._reserve_in_line(held)
            self._watch(tasks, leg.booking.member)
            await self._assign(prefill.node, leg.booking.address)
            self._assigned = True
        try:
            await self._receive(leg)
        except NodeLost:
            leg.booking.failed()
            raise

    async def _assign(self, prefill: PrefillNode, address: str) -> None:
        try:
            await prefill.assign(self._transfer_id, self._epoch, address)
        except HandshakeRefused:
            if self._token0.is_set():
                raise
            # A job and its assignment travel side by side; after token 0 the job is certainly known.
            await self._token0.wait()
            await prefill.assign(self._transfer_id, self._epoch, address)

    async def _receive(self, leg: _DecodeLeg) -> None:
        flight, who = self._flight, f"decode node {leg.booking.member.node_id}"
        async with deadline(None, "the KV transfer") as self._transfer_limit:
            self._arm_transfer_limit()
            landed = await _expect(leg.events, Landed, who)
        self._transfer_limit = None
        self._landed.set()
        self._watchers[0].cancel()  # the prefill node may go now
        flight.receipts.append(landed.receipt)
        await self._token0.wait()  # token 1 may overtake token 0, which comes from the other node
        finished = False
        async with deadline(self._deadlines.token_s, "the next token") as limit:
            async for event in leg.events:
                limit.reschedule(asyncio.get_running_loop().time() + self._deadlines.token_s)
                if isinstance(event, Swapped):
                    continue
                if isinstance(event, Token):
                    self._decoding = True
                    finished = event.finish is not None
                    # A token that ends the request is followed by the node's account of its time, which we want.
                    if not flight.deliver(event) and not finished:
                        self._complete.set()
                        return
                elif isinstance(event, Decoded) and finished:
                    self._take_decoded(event)
                    self._complete.set()
                    return
                else:
                    raise NodeLost(f"{who} sent {type(event).__name__} out of turn")
        if not finished:
            raise NodeLost(f"{who} ended its stream before the last token")
        self._complete.set()

    def _take_decoded(self, decoded: Decoded) -> None:
        self._measured[Stage.DECODE_QUEUE] = decoded.queue_s
        self._measured[Stage.DECODE] = decoded.decode_s
        self._flight.clock.sub_stages[SubStage.ATTEND] += decoded.attend_s
        self._flight.clock.sub_stages[SubStage.APPROXIMATION] += decoded.approximation_s
        self._accounted = True

    async def _reserve_if_room(self, held: AsyncExitStack) -> _DecodeLeg | None:
        async with deadline(self._deadlines.queue_s, "reserving decode capacity"):
            while booking := self._fleet.try_book_decode(self._kv_tokens, self._avoid):
                if leg := await self._reserve(held, booking):
                    return leg
        return None

    async def _reserve_in_line(self, held: AsyncExitStack) -> _DecodeLeg:
        while True:
            booking = await self._fleet.book_decode(self._kv_tokens, self._avoid)
            if leg := await self._reserve(held, booking):
                return leg

    async def _reserve(self, held: AsyncExitStack, booking: Booking[DecodeNode]) -> _DecodeLeg | None:
        """Open the decode stream and wait until the node holds the pages; None if it has no room after all."""
        held.enter_context(booking)
        node_id = booking.member.node_id
        job = DecodeJob(self._flight.request, self._transfer_id, self._epoch)
        events = await held.enter_async_context(closing(booking.node.decode(job)))
        self.nodes.add(node_id)
        try:
            await _expect(events, Reserved, f"decode node {node_id}")
        except Overloaded:
            booking.refused()
            return None
        except NodeLost:
            booking.failed()
            raise
        booking.worked()
        self._flight.decode_node = node_id
        return _DecodeLeg(booking, events)

    # Both -----------------------------------------------------------------------------------------------------------

    def _watch(self, tasks: asyncio.TaskGroup, member: Member[PrefillNode] | Member[DecodeNode]) -> None:
        self._watchers.append(tasks.create_task(member.watch()))

    def _arm_transfer_limit(self) -> None:
        """The transfer's time runs from token 0 or from the assignment, whichever is later."""
        if self._transfer_limit is not None and self._token0.is_set():
            self._transfer_limit.reschedule(asyncio.get_running_loop().time() + self._deadlines.transfer_s)
