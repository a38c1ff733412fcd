"""Both ends of a handoff, for tests of wires."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from tests.transport import nouns
from transport.base import Deliver
from transport.grpc_wire import GrpcListener, GrpcSender
from transport.link import LinkKind
from transport.rpc_server import RpcServer

FRAME_TIMEOUT_S = 5.0
Frames = AsyncIterator[KvFrame | HandoffEnd]


class Table:
    """An `Exchange` of two ends in one process. `change` is applied to the value with name `of`."""

    def __init__(self, change: Callable[[bytes], bytes] = bytes, of: str = "0") -> None:
        self._said: dict[str, bytes] = {}
        self._change, self._of = change, of
        self._news = threading.Condition()

    def put(self, name: str, value: bytes) -> None:
        with self._news:
            self._said[name] = self._change(value) if name == self._of else value
            self._news.notify_all()

    def get(self, name: str) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: name in self._said, 60)
            return self._said[name]


class Reader:
    """A `deliver` that reads everything, and records items, progress and its error."""

    def __init__(self) -> None:
        self.items: list[KvFrame | HandoffEnd] = []
        self.started = asyncio.Event()
        self.first = asyncio.Event()
        self.over = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, handoff: Handoff, frames: Frames) -> Receipt:
        self.started.set()
        try:
            async for item in frames:
                self.items.append(item)
                self.first.set()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.over.set()
        return nouns.receipt(handoff.transfer_id, tokens=len(self.items))


class Source:
    """Frames of a sender that never end. Records whether they were asked for, blocked or closed."""

    def __init__(self, before_block: int = 1) -> None:
        self.before_block = before_block
        self.touched = False
        self.blocked = asyncio.Event()
        self.closed = asyncio.Event()

    async def frames(self) -> Frames:
        self.touched = True
        try:
            for seq in range(self.before_block):
                yield nouns.frame(seq)
            self.blocked.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@asynccontextmanager
async def listening(kind: LinkKind, deliver: Deliver) -> AsyncIterator[str]:
    async with RpcServer("127.0.0.1", 0) as server:
        listener = GrpcListener(server, frame_timeout_s=FRAME_TIMEOUT_S, link=kind)
        try:
            yield await listener.serve(deliver)
        finally:
            await listener.close()


@asynccontextmanager
async def sending(kind: LinkKind) -> AsyncIterator[GrpcSender]:
    sender = GrpcSender(link=kind, host="127.0.0.1")
    try:
        yield sender
    finally:
        await sender.close()
