"""A decode node's part in a request: room, then KV, then tokens. Each leg of a prompt has its own epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from hackkv.errors import HackkvError, NodeLost, Overloaded, TransferError, by_code
from hackkv.held import NOTHING_HELD
from hackkv.types import DecodeEvent, DecodeJob, HandoffFailed, Landed, Reserved
from router.fleet.booking import Booking
from router.fleet.holdings import Marks
from router.life.events import expect, hand_on
from router.scopes import Alarm
from transport.base import DecodeNode
from transport.closing import closing

T = TypeVar("T")


class DecodeLeg:
    """One job on one decode node, from the booking to `close`, which gives everything back."""

    def __init__(self, booking: Booking[DecodeNode], job: DecodeJob) -> None:
        self.booking, self.job = booking, job
        self.events: AsyncIterator[DecodeEvent] = booking.node.decode(job)
        self.landed = False
        """Whether the decode node says that it has the KV."""
        self.held = NOTHING_HELD
        """KV of the prompt that the node has already."""
        self.handed_off = False
        """Whether the prefill node says that the decode node has the KV."""
        self.push_over = asyncio.Event()
        """Set when the prefill node has nothing more to say of its push."""
        self._alarm = Alarm()

    @property
    def node_id(self) -> str:
        """The node's name."""
        return self.booking.member.node_id

    @property
    def delivered(self) -> bool:
        """Whether the node has the KV."""
        return self.landed or self.handed_off

    async def reserve(self) -> None:
        """Wait until the node holds room. Raises `Overloaded` if it has none after all, `NodeLost`, `NodeDraining`."""
        try:
            reserved = await self.booking.guard(expect(self.events, Reserved, f"decode node {self.node_id}"))
        except Overloaded:
            self.booking.refused()
            raise
        self.held = reserved.held
        self.booking.worked()

    async def land(self, marks: Marks) -> Landed:
        """Wait for the KV of the prompt. `marks` are those of its first pages."""
        landed = await expect(self.events, Landed, f"decode node {self.node_id}")
        self.booking.will_hold(marks)
        self.landed = True
        return landed

    async def each(self, take: Callable[[DecodeEvent], bool]) -> None:
        """Hand further events to `take` until it returns True or the node ends its stream."""

        def heard(event: DecodeEvent) -> bool:
            self.booking.heard()
            return take(event)

        await hand_on(self.events, heard)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises if the node is lost, or `push_failed` or `fail` is called, before that."""
        return await self.booking.guard(work, self._alarm)

    def fail(self, error: HackkvError) -> None:
        """Give up waiting for the node."""
        self._alarm.ring(error)

    def push_ended(self) -> None:
        """The prefill node says that its push ended well."""
        self.handed_off = True
        self.push_over.set()

    def push_failed(self, fate: HandoffFailed) -> None:
        """The prefill node says that its push failed. Once the KV has landed, that changes nothing."""
        if self.landed:
            return
        error = by_code(fate.code, fate.message)
        # Any other error of a push counts as a failed transfer, since another decode node may do better.
        known = isinstance(error, NodeLost | TransferError)
        self.fail(error if known else TransferError(f"{fate.code}: {fate.message}"))

    async def close(self) -> None:
        """End the job and give the room back; more calls do nothing."""
        async with closing(self.events):
            self.booking.release()
