"""Wrappers of both kinds of nodes, of a sender and of `Lend`. Each behaves like the original until a rule strikes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from faults.injector import Injector
from faults.plan import Point
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.nodes import NodeInfo
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    HandedOff,
    Handoff,
    HandoffEnd,
    HandoffFailed,
    KvFrame,
    Landed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Receipt,
    Reserved,
    Swapped,
    Token,
)
from transport.base import DecodeNode, KvSender, Lend, PrefillNode
from transport.closing import closing

PREFILL_POINTS: dict[type[PrefillEvent], Point] = {
    Prefilled: Point.FIRST_TOKEN,
    HandedOff: Point.HANDED_OFF,
    HandoffFailed: Point.HANDOFF_FAILED,
}
DECODE_POINTS: dict[type[DecodeEvent], Point] = {
    Reserved: Point.RESERVED,
    Landed: Point.LANDED,
    Token: Point.TOKEN,
    Swapped: Point.SWAPPED,
    Decoded: Point.DECODED,
}


class FaultyPrefill:
    """A `PrefillNode` under a plan."""

    def __init__(self, node: PrefillNode, faults: Injector) -> None:
        self._node, self._faults = node, faults

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Run a prompt. A rule may strike before each event is sent."""
        request = job.request.request_id
        self._faults.requests[job.transfer_id] = request
        try:
            await self._faults.reach(Point.PREFILL_JOB, request)
            async with closing(self._node.prefill(job)) as events:
                async for event in events:
                    await self._faults.reach(PREFILL_POINTS[type(event)], request)
                    yield event
        finally:
            self._faults.requests.pop(job.transfer_id, None)

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name the decode node of a job."""
        await self._faults.reach(Point.ASSIGN, self._faults.requests.get(transfer_id, ""))
        await self._node.assign(transfer_id, epoch, decode_address, held)

    async def describe(self) -> NodeInfo:
        """Report the node's state; a rule may strike before."""
        await self._faults.reach(Point.REPORT, "")
        return await self._node.describe()


class FaultyDecode:
    """A `DecodeNode` under a plan."""

    def __init__(self, node: DecodeNode, faults: Injector) -> None:
        self._node, self._faults = node, faults

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve one request. A rule may strike before each event is sent."""
        request = job.request.request_id
        await self._faults.reach(Point.DECODE_JOB, request)
        async with closing(self._node.decode(job)) as events:
            async for event in events:
                await self._faults.reach(DECODE_POINTS[type(event)], request)
                yield event

    async def describe(self) -> NodeInfo:
        """Report the node's state; a rule may strike before."""
        await self._faults.reach(Point.REPORT, "")
        return await self._node.describe()


def lending(lend: Lend, faults: Injector) -> Lend:
    """A `Lend` under a plan. A rule may strike before each frame is sent."""

    async def struck(handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        async with closing(lend(handoff)) as items:
            async for item in items:
                for one in await faults.reach_frame(item, Point.LENT) if isinstance(item, KvFrame) else [item]:
                    yield one

    return struck


class FaultySender:
    """A `KvSender` under a plan."""

    def __init__(self, sender: KvSender, faults: Injector) -> None:
        self._sender, self._faults = sender, faults

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send a handoff. Rules may strike it and drop, damage or repeat its frames."""
        request = self._faults.requests.get(handoff.transfer_id, "")
        async with closing(self._struck(frames, request)) as struck:
            await self._faults.reach(Point.HANDOFF, request)
            receipt = await self._sender.push(address, handoff, struck)
        await self._faults.reach(Point.RECEIPT, request)
        return receipt

    def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch pages; rules strike at the node that lends them (`lending`)."""
        return self._sender.fetch(address, handoff)

    async def close(self) -> None:
        """Drop every connection."""
        await self._sender.close()

    async def _struck(
        self, frames: AsyncIterator[KvFrame | HandoffEnd], request: str
    ) -> AsyncIterator[KvFrame | HandoffEnd]:
        async with closing(frames):
            async for item in frames:
                if isinstance(item, HandoffEnd):
                    await self._faults.reach(Point.END, request)
                    yield item
                else:
                    for frame in await self._faults.reach_frame(item):
                        yield frame
