"""KV frames over one bidirectional gRPC stream per handoff.

    sender   Handoff ............ frame frame ... HandoffEnd
    receiver ......... Accepted ............................ Receipt        or, at any point, a Failure

HTTP/2 flow control is the back-pressure: the receiver reads a message when `deliver` asks for a frame, and a write at
the sender waits while the window is full. A payload is copied once, into the message to send. With a link
(`transport/pair.py`) the payload travels beside the stream, which only announces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc.aio

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, HandshakeRefused, NodeLost, TransferError
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from transport import methods
from transport.base import Deliver, Lend
from transport.channels import BULK, ChannelPool, Keepalive
from transport.closing import closing, reap
from transport.convert_kv import PUSH_REPLY, PUSH_REQUEST, Accepted, Announced, encode_push_request
from transport.delivery import FRAME_TIMEOUT_S, Delivery, check_size
from transport.link import LinkKind
from transport.pairs import InPairs, OutPairs
from transport.rpc_client import LenderClient
from transport.rpc_server import PLAIN, WIRE_KEY, RpcServer
from transport.status import Context, answer, outstay, read_message, translating, write_message
from transport.trust import EVERYBODY, Trust

STALL_TIMEOUT_S = 60.0
"""Seconds that a sender waits for the receiver: to accept, to take one frame, to commit."""

PushCall = grpc.aio.StreamStreamCall[bytes, bytes]


class Outlet(Protocol):
    """The way out for the payloads of one push."""

    async def message(self, item: KvFrame | HandoffEnd) -> bytes:
        """The stream's message for `item`. Waits while too many payloads are under way. Raises `NodeLost` or
        `DeadlineExceeded`."""
        ...


class Outlets(Protocol):
    """The ways out for the payloads of a sender."""

    def outlet(self, address: str) -> AbstractAsyncContextManager[Outlet]:
        """The way out for one push to `address`."""
        ...

    async def close(self) -> None:
        """Drop every connection."""
        ...


class InFrames:
    """Payloads that travel in the messages of their frames."""

    @asynccontextmanager
    async def outlet(self, address: str) -> AsyncIterator[Outlet]:
        """See `Outlets`."""
        yield self

    async def message(self, item: KvFrame | HandoffEnd) -> bytes:
        """See `Outlet`."""
        return encode_push_request(item)

    async def close(self) -> None:
        """There is nothing to drop."""


class GrpcSender:
    """A `KvSender` with connections of its own, so that bulk KV never delays a control call on the same socket."""

    def __init__(
        self,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        keepalive: Keepalive = BULK,
        trust: Trust = EVERYBODY,
        link: LinkKind | None = None,
        host: str = "",
    ) -> None:
        """`link` carries payloads, on sockets at `host`. Without a link, payloads travel in their frames."""
        self._channels = ChannelPool(keepalive, trust)
        self._stall_timeout_s = stall_timeout_s
        self._wire = link.name if link else PLAIN
        self._outlets: Outlets = OutPairs(link, host, self._channels) if link else InFrames()

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send one handoff; return the receipt when the receiver has committed it.

        `frames` is not touched before the receiver has accepted. At the end it is closed if it is a generator. Raises
        the receiver's error word for word, the error that `frames` raises, `NodeLost`, or `DeadlineExceeded` if the
        receiver stalls.
        """
        async with self._outlets.outlet(address) as outlet:
            return await self._push(address, handoff, frames, outlet)

    def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        """Fetch pages. Their payloads travel in their frames, even where a link carries those of pushes."""
        return LenderClient(address, self._channels).fetch(handoff)

    async def close(self) -> None:
        """Drop every connection; pushes and fetches under way fail with `NodeLost`."""
        await self._outlets.close()
        await self._channels.close()

    async def _push(
        self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd], outlet: Outlet
    ) -> Receipt:
        channel = await self._channels.get(address)
        metadata = (*self._channels.metadata, (WIRE_KEY, self._wire))
        with translating(address):
            call: PushCall = channel.stream_stream(methods.KV_PUSH, None, None)(None, metadata=metadata)
        accepted = asyncio.Event()
        verdict = asyncio.create_task(self._listen(call, address, accepted))
        pump = asyncio.create_task(self._pump(call, address, handoff, frames, outlet, accepted))
        try:
            await asyncio.wait({verdict, pump}, return_when=asyncio.FIRST_COMPLETED)
            if not verdict.done():
                pump.result()  # raises if this side failed
                await asyncio.wait({verdict}, timeout=self._stall_timeout_s)
            if not verdict.done():
                raise DeadlineExceeded(f"{address} did not commit {handoff.transfer_id}")
            return verdict.result()
        finally:
            call.cancel()
            await reap(pump, verdict)

    async def _listen(self, call: PushCall, address: str, accepted: asyncio.Event) -> Receipt:
        """Read the receiver's replies up to its receipt, or raise its error."""
        while True:
            with translating(address):
                data = await call.read()
            if not isinstance(data, bytes):  # grpc.aio.EOF
                raise NodeLost(f"{address} ended the stream without a receipt")
            reply = PUSH_REPLY.decode(data)
            if isinstance(reply, HackkvError):
                raise reply
            if isinstance(reply, Receipt):
                return reply
            accepted.set()

    async def _pump(
        self,
        call: PushCall,
        address: str,
        handoff: Handoff,
        frames: AsyncIterator[KvFrame | HandoffEnd],
        outlet: Outlet,
        accepted: asyncio.Event,
    ) -> None:
        """Write the handoff and, once it is accepted, its frames. If the call is over, returns early: `_listen` raises
        the reason."""
        try:
            if not await write_message(call, encode_push_request(handoff)):
                return
            async with asyncio.timeout(self._stall_timeout_s):
                await accepted.wait()
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{address} did not accept {handoff.transfer_id}") from exc
        async with closing(frames):
            async for item in frames:
                check_size(item)
                try:
                    async with asyncio.timeout(self._stall_timeout_s):
                        alive = await write_message(call, await outlet.message(item))
                except TimeoutError as exc:
                    raise DeadlineExceeded(f"{address} stopped taking frames of {handoff.transfer_id}") from exc
                if not alive or isinstance(item, HandoffEnd):
                    return
        raise TransferError(f"the frames of {handoff.transfer_id} ended without a HandoffEnd")


class GrpcListener:
    """A `KvListener` on an `RpcServer`. It starts the server; the server's owner closes it."""

    def __init__(
        self, server: RpcServer, *, frame_timeout_s: float = FRAME_TIMEOUT_S, link: LinkKind | None = None
    ) -> None:
        self._server = server
        self._wire = link.name if link else PLAIN
        self._pairs = InPairs(link, server.host) if link else None
        self._frame_timeout_s = frame_timeout_s
        self._deliver: Deliver | None = None
        self._active: dict[Delivery, asyncio.Task[Any] | None] = {}

    async def serve(self, deliver: Deliver, lend: Lend | None = None) -> str:
        """Accept handoffs and lend pages; return the address that senders dial."""
        self._deliver = deliver
        if lend is not None:
            self._server.add_lender(lend)
        self._server.add_stream(methods.KV_PUSH, self._wire, self._receive)
        if self._pairs is not None:
            self._server.add_stream(methods.KV_CONNECT, self._wire, self._pairs.serve)
        return await self._server.start()

    async def close(self) -> None:
        """Refuse new handoffs and end those under way with `NodeLost`; returns when their `deliver` has returned."""
        self._deliver = None
        tasks = {task for task in self._active.values() if task is not None}
        for delivery in self._active:
            delivery.lose(NodeLost("the receiver is closing"))
        if tasks:
            await asyncio.wait(tasks)
        if self._pairs is not None:
            await self._pairs.close()

    async def _receive(self, context: Context) -> None:
        """Serve one `Push` call. The verdict is a message, and the sender ends the call."""
        verdict: Receipt | HackkvError
        try:
            verdict = await self._deliver_from(context)
        except HackkvError as error:
            verdict = error
        await answer(context, PUSH_REPLY.encode(verdict))
        await outstay(context, self._frame_timeout_s)

    async def _deliver_from(self, context: Context) -> Receipt:
        deliver = self._deliver
        if deliver is None:
            raise NodeLost("the receiver is closed")
        handoff = await self._open(context)
        delivery = Delivery(
            deliver,
            handoff,
            accept=lambda: answer(context, PUSH_REPLY.encode(Accepted())),
            pull=lambda: self._read_frame(context),
            frame_timeout_s=self._frame_timeout_s,
        )
        self._active[delivery] = asyncio.current_task()
        try:
            return await delivery.run()
        finally:
            del self._active[delivery]

    async def _open(self, context: Context) -> Handoff:
        try:
            async with asyncio.timeout(self._frame_timeout_s):
                first = await context.read()
        except TimeoutError as exc:
            raise DeadlineExceeded(f"no handoff came within {self._frame_timeout_s:g} s") from exc
        if not isinstance(first, bytes):  # grpc.aio.EOF
            raise HandshakeRefused("the stream ended before a Handoff")
        handoff = PUSH_REQUEST.decode(first)
        if not isinstance(handoff, Handoff):
            raise HandshakeRefused(f"the stream must open with a Handoff, not {type(handoff).__name__}")
        return handoff

    async def _read_frame(self, context: Context) -> KvFrame | HandoffEnd:
        data = await read_message(context)
        item = PUSH_REQUEST.decode(data)
        if isinstance(item, Handoff):
            raise FrameRefused("a second Handoff on one stream", reason="order")
        if isinstance(item, Announced):
            if self._pairs is None:
                raise FrameRefused("this wire carries payloads in its frames", reason="malformed")
            return replace(item.frame, payload=await self._pairs.take(item), header_bytes=len(data))
        if isinstance(item, KvFrame):
            return replace(item, header_bytes=len(data) - len(item.payload))
        return item
