"""KV frames over one bidirectional gRPC stream per handoff.

    sender   Handoff ............ frame frame ... HandoffEnd
    receiver ......... Accepted ............................ Receipt        or, at any point, a Failure

HTTP/2 flow control is the back-pressure: the receiver reads a message when `deliver` asks for a frame, and a write at
the sender waits while the window is full. A payload is copied once into the message to send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, HandshakeRefused, NodeLost, TransferError
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from transport import methods
from transport.base import Deliver
from transport.channels import BULK, ChannelPool, Keepalive
from transport.closing import closing, reap
from transport.convert_kv import PUSH_REPLY, PUSH_REQUEST, Accepted, encode_push_request
from transport.delivery import FRAME_TIMEOUT_S, Delivery, check_size
from transport.rpc_server import RpcServer
from transport.status import Context, answer, cancelled_from_outside, translating
from transport.trust import EVERYBODY, Trust

STALL_TIMEOUT_S = 60.0
"""How long a sender waits for the receiver: to accept, to take one frame, to commit."""

PushCall = grpc.aio.StreamStreamCall[bytes, bytes]


class GrpcSender:
    """A `KvSender` with connections of its own, so that bulk KV never delays a control call on the same socket."""

    def __init__(
        self,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        keepalive: Keepalive = BULK,
        trust: Trust = EVERYBODY,
    ) -> None:
        self._channels = ChannelPool(keepalive, trust)
        self._stall_timeout_s = stall_timeout_s

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Send one handoff; return the receiver's word that it is committed.

        `frames` is not touched before the receiver has accepted. At the end it is closed if it is a generator. Raises
        the receiver's error word for word, the error that `frames` raises, `NodeLost`, or `DeadlineExceeded` if the
        receiver stalls.
        """
        channel = await self._channels.get(address)
        with translating(address):
            call: PushCall = channel.stream_stream(methods.KV_PUSH, None, None)(None, metadata=self._channels.metadata)
        accepted = asyncio.Event()
        verdict = asyncio.create_task(self._listen(call, address, accepted))
        pump = asyncio.create_task(self._pump(call, address, handoff, frames, accepted))
        try:
            await asyncio.wait({verdict, pump}, return_when=asyncio.FIRST_COMPLETED)
            if not verdict.done():
                pump.result()  # raises if our own side failed
                await asyncio.wait({verdict}, timeout=self._stall_timeout_s)
            if not verdict.done():
                raise DeadlineExceeded(f"{address} did not commit {handoff.transfer_id}")
            return verdict.result()
        finally:
            call.cancel()
            await reap(pump, verdict)

    async def close(self) -> None:
        """Drop every connection; pushes under way fail with `NodeLost`."""
        await self._channels.close()

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
        accepted: asyncio.Event,
    ) -> None:
        """Write the handoff and, once accepted, its frames. Returns early if the call is over; `_listen` raises why."""
        try:
            if not await self._write(call, encode_push_request(handoff)):
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
                        alive = await self._write(call, encode_push_request(item))
                except TimeoutError as exc:
                    raise DeadlineExceeded(f"{address} stopped taking frames of {handoff.transfer_id}") from exc
                if not alive or isinstance(item, HandoffEnd):
                    return
        raise TransferError(f"the frames of {handoff.transfer_id} ended without a HandoffEnd")

    async def _write(self, call: PushCall, data: bytes) -> bool:
        """Write one message; False if the call is over."""
        try:
            await call.write(data)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return False
        except asyncio.CancelledError:
            if cancelled_from_outside():
                raise
            return False
        return True


class GrpcListener:
    """A `KvListener` on an `RpcServer`. It starts the server; the server's owner closes it."""

    def __init__(self, server: RpcServer, *, frame_timeout_s: float = FRAME_TIMEOUT_S) -> None:
        self._server = server
        self._frame_timeout_s = frame_timeout_s
        self._deliver: Deliver | None = None
        self._active: dict[Delivery, asyncio.Task[Any] | None] = {}

    async def serve(self, deliver: Deliver) -> str:
        """Accept handoffs; return the address that senders dial."""
        self._deliver = deliver
        self._server.add_push(self._receive)
        return await self._server.start()

    async def close(self) -> None:
        """Refuse new handoffs and end those under way with `NodeLost`; returns when their `deliver` has returned."""
        self._deliver = None
        tasks = {task for task in self._active.values() if task is not None}
        for delivery in self._active:
            delivery.lose(NodeLost("the receiver is closing"))
        if tasks:
            await asyncio.wait(tasks)

    async def _receive(self, context: Context) -> None:
        """One `Push` call.

        The verdict is a message, and the sender ends the call. A verdict in the call's status could overtake a frame
        that the sender is writing. grpc.aio would then report the failed write and hide the status.
        """
        verdict: Receipt | HackkvError
        try:
            verdict = await self._deliver_from(context)
        except HackkvError as error:
            verdict = error
        await answer(context, PUSH_REPLY.encode(verdict))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._frame_timeout_s):
                while isinstance(await context.read(), bytes):
                    pass

    async def _deliver_from(self, context: Context) -> Receipt:
        deliver = self._deliver
        if deliver is None:
            raise NodeLost("the receiver is closed")
        handoff = await self._open(context)
        delivery = Delivery(
            deliver,
            handoff,
            accept=lambda: answer(context, PUSH_REPLY.encode(Accepted())),
            pull=lambda: _read_frame(context),
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


async def _read_frame(context: Context) -> KvFrame | HandoffEnd:
    try:
        data = await context.read()
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise NodeLost("the sender went away") from None
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise NodeLost("the sender ended the stream before HandoffEnd")
    item = PUSH_REQUEST.decode(data)
    if isinstance(item, Handoff):
        raise FrameRefused("a second Handoff on one stream", reason="out_of_order")
    if isinstance(item, KvFrame):
        return replace(item, header_bytes=len(data) - len(item.payload))
    return item
