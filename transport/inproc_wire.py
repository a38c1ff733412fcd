"""KV frames within one event loop, for tests and for a cluster in one process. The semantics are those of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from hackkv.errors import ConfigError, NodeLost, TransferError, Unavailable
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from transport.base import Deliver, Lend
from transport.closing import closing
from transport.delivery import FRAME_TIMEOUT_S, Delivery, check_size


class InprocNetwork:
    """Addresses that exist within this object only."""

    def __init__(self) -> None:
        self.listeners: dict[str, InprocListener] = {}
        self._names = count(1)

    def sender(self) -> InprocSender:
        """A new `KvSender` that reaches every listener of this network."""
        return InprocSender(self)

    def listener(self, address: str = "", *, frame_timeout_s: float = FRAME_TIMEOUT_S) -> InprocListener:
        """A new `KvListener` that `serve` binds to `address`; without one, to an address of its own."""
        return InprocListener(self, address or f"inproc-{next(self._names)}", frame_timeout_s)


class InprocListener:
    """A `KvListener` at one address of an `InprocNetwork`."""

    def __init__(self, network: InprocNetwork, address: str, frame_timeout_s: float) -> None:
        self._network = network
        self._address = address
        self._frame_timeout_s = frame_timeout_s
        self._deliver: Deliver | None = None
        self.lend: Lend | None = None
        self._active: dict[Delivery, asyncio.Task[Any]] = {}

    async def serve(self, deliver: Deliver, lend: Lend | None = None) -> str:
        """Accept handoffs and lend pages at the address. Raises `ConfigError` if it is taken."""
        if self._network.listeners.setdefault(self._address, self) is not self:
            raise ConfigError(f"cannot listen on {self._address}: the address is taken")
        self._deliver, self.lend = deliver, lend
        return self._address

    async def close(self) -> None:
        """Free the address and end handoffs under way with `NodeLost`; returns when their `deliver` has returned."""
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        self._deliver = self.lend = None
        tasks = set(self._active.values())
        for delivery in self._active:
            delivery.lose(NodeLost(f"{self._address}: the receiver is closing"))
        if tasks:
            await asyncio.wait(tasks)

    def open(self, handoff: Handoff, source: _Source) -> Delivery:
        """Begin to receive one handoff."""
        if self._deliver is None:
            raise NodeLost(f"{self._address}: the receiver is closed")
        return Delivery(self._deliver, handoff, source.accept, source.pull, self._frame_timeout_s)

    async def run(self, delivery: Delivery) -> Receipt:
        """Receive to the end, in a task that `close` can wait for."""
        task = asyncio.create_task(delivery.run())
        self._active[delivery] = task
        try:
            return await task
        finally:
            del self._active[delivery]


class InprocSender:
    """A `KvSender` within an `InprocNetwork`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._active: set[Delivery] = set()
        self._closed = False

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send one handoff; see `KvSender.push`. `frames` is closed at the end if it is a generator."""
        listener = self._reach(address)
        source = _Source(frames, handoff.transfer_id)
        delivery = listener.open(handoff, source)
        self._active.add(delivery)
        try:
            async with closing(frames):
                return await listener.run(delivery)
        except Exception:
            if source.failure is not None:  # this side failed: its error takes precedence over the receiver's
                raise source.failure from None
            raise
        finally:
            self._active.discard(delivery)

    async def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch pages; see `KvSender.fetch`."""
        lend = self._reach(address).lend
        if lend is None:
            raise Unavailable(f"{address}: lends nothing")
        async with closing(lend(handoff)) as items:
            async for item in items:
                if self._reach(address).lend is not lend:
                    raise NodeLost(f"{address}: the lender is closed")
                check_size(item)
                yield item

    async def close(self) -> None:
        """Refuse further calls; those under way fail with `NodeLost`."""
        self._closed = True
        for delivery in self._active:
            delivery.lose(NodeLost("the sender is closed"))

    def _reach(self, address: str) -> InprocListener:
        listener = self._network.listeners.get(address)
        if self._closed:
            raise NodeLost(f"{address}: the client is closed")
        if listener is None:
            raise NodeLost(f"{address}: nobody listens")
        return listener


class _Source:
    """The sender's frames, as a receiver pulls them; remembers how the sender failed."""

    def __init__(self, frames: AsyncIterator[KvFrame | HandoffEnd], transfer_id: str) -> None:
        self._frames = frames
        self._transfer_id = transfer_id
        self.failure: Exception | None = None

    async def accept(self) -> None:
        """Do nothing: the receiver's first pull starts the sender."""

    async def pull(self) -> KvFrame | HandoffEnd:
        """Take one frame from the sender. Every failure at the sender becomes `NodeLost`."""
        try:
            item = await anext(self._frames)
            check_size(item)
        except StopAsyncIteration:
            self.failure = TransferError(f"the frames of {self._transfer_id} ended without a HandoffEnd")
            raise NodeLost("the sender ended the stream before HandoffEnd") from None
        except Exception as error:
            self.failure = error
            raise NodeLost(f"the sender failed: {type(error).__name__}") from error
        return item
