"""Fake nodes and a fake registry that replay given events, and a caller's view of all three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from hackkv.errors import (
    HandshakeRefused,
)
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.nodes import Lease, NodeInfo
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    Finish,
    HandedOff,
    HandoffFailed,
    Landed,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Reserved,
    Swapped,
    Token,
)
from tests.transport import nouns
from transport.base import DecodeNode, PrefillNode, Registry

PREFILL_EVENTS: list[PrefillEvent] = [
    Prefilled(Token(0, 11, None, -0.5), 0.1, 0.2, 0.05, 3, fetched_tokens=64, fetched_bytes=640, fetch_s=0.05),
    HandoffFailed(0, "node_lost", "d-1 went away"),
    HandedOff(nouns.receipt(), 0.0, 0.3, 512, epoch=1),
]
DECODE_EVENTS: list[DecodeEvent] = [
    Reserved(HeldKv(3, 2)),
    Landed(nouns.receipt()),
    Token(1, 12),
    Swapped(),
    Token(2, 13, Finish.STOP),
    Decoded(0.1, 0.2, 0.1, 0.01),
]


class FakePrefill:
    """A prefill node that yields `events`, then hangs or raises `error` if told to."""

    def __init__(self) -> None:
        self.events: list[PrefillEvent] = PREFILL_EVENTS
        self.error: Exception | None = None
        self.hang = False
        self.jobs: list[PrefillJob] = []
        self.assigned: list[tuple[str, int, str, HeldKv]] = []
        self.closed = asyncio.Event()

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        self.jobs.append(job)
        try:
            for event in self.events:
                yield event
            if self.hang:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        if self.error is not None:
            raise self.error
        self.assigned.append((transfer_id, epoch, decode_address, held))

    async def describe(self) -> NodeInfo:
        if self.hang:
            await asyncio.Event().wait()
        return nouns.node_info("p-1")


class FakeDecode:
    """A decode node that yields `DECODE_EVENTS`."""

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        for event in DECODE_EVENTS:
            yield event

    async def describe(self) -> NodeInfo:
        return nouns.node_info()


class FakeRegistry:
    """A registry that grants a lease to one known node."""

    async def register(self, info: NodeInfo) -> Lease:
        if info != nouns.node_info():
            raise HandshakeRefused("node_id: 'd-1' here")
        return Lease(3.5)


@dataclass(frozen=True)
class Cluster:
    """A caller's view of the three services, and the implementation behind the prefill node."""

    fake: FakePrefill
    prefill: PrefillNode
    decode: DecodeNode
    registry: Registry
