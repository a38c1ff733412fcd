"""The pairs of a process: those that it opened as sender, and those that other processes opened with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import grpc.aio

from hackkv.errors import DeadlineExceeded, FrameRefused, HackkvError, HandshakeRefused, NodeLost, Overloaded
from hackkv.types import HandoffEnd, KvFrame, Payload
from transport import methods
from transport.channels import ChannelPool
from transport.convert_kv import PUSH_REQUEST, Announced, encode_push_request
from transport.convert_pair import PAIR_MESSAGE, Hello, Paired, PairMessage
from transport.link import CONNECT_TIMEOUT_S, LinkKind
from transport.pair import InPair, OutPair
from transport.rpc_server import WIRE_KEY
from transport.status import Context, answer, outstay, read_message, translating

MAX_PAIRS: Final = 32
"""Pairs that a sender keeps, and half of those that a receiver accepts. A sender closes the idle pair that it used
longest ago to make room."""
ConnectCall = grpc.aio.StreamStreamCall[bytes, bytes]
AHEAD: Final = 2
"""Parcels that a push announces before they are sent: the next is announced while one is under way."""


class OutPairs:
    """The pairs that this process opened, by address of the receiver."""

    def __init__(self, kind: LinkKind, host: str, channels: ChannelPool, most: int = MAX_PAIRS) -> None:
        self._kind, self._host, self._channels, self._most = kind, host, channels, most
        self._berths: dict[str, _Berth] = {}

    @asynccontextmanager
    async def outlet(self, address: str) -> AsyncIterator[_Consignment]:
        """The way out for payloads of one push to `address`. Opens a pair if there is none, or it is lost.

        Raises `NodeLost`, `HandshakeRefused` when the dialects of the links differ, or `DeadlineExceeded`.
        """
        berth = self._berths.pop(address, None) or _Berth()
        self._berths[address] = berth  # the order is that of the last use
        berth.pushes += 1
        try:
            async with berth.connecting:
                if berth.pair is None or berth.pair.lost:
                    berth.pair = await self._connect(address)
            consignment = _Consignment(berth.pair)
            try:
                yield consignment
            finally:
                consignment.end()
        finally:
            berth.pushes -= 1
            self._evict()

    async def close(self) -> None:
        """End every pair."""
        pairs = [berth.pair for berth in self._berths.values() if berth.pair]
        self._berths.clear()
        for pair in pairs:
            await pair.close(NodeLost("the sender is closed"))

    async def _connect(self, address: str) -> OutPair:
        channel = await self._channels.get(address)
        with translating(address):
            call: ConnectCall = channel.stream_stream(methods.KV_CONNECT, None, None)(
                None, metadata=(*self._channels.metadata, (WIRE_KEY, self._kind.name))
            )
        pair = OutPair(self._kind.open(0, self._host), _CallStream(call, address))
        pair.start()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await pair.open(Hello(self._kind.dialect))
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{address}: no {self._kind.name} link within {CONNECT_TIMEOUT_S:g} s") from exc
        finally:
            if not pair.number:
                pair.lose(NodeLost("the pair was not connected"))
        return pair

    def _evict(self) -> None:
        idle = [address for address, berth in self._berths.items() if not berth.pushes]
        for address in idle[: max(0, len(self._berths) - self._most)]:
            berth = self._berths.pop(address)
            if berth.pair:
                berth.pair.lose(NodeLost("the pair made room for others"))


@dataclass(slots=True)
class _Berth:
    """The place for the pair with one receiver, and the number of pushes that use it."""

    pair: OutPair | None = None
    pushes: int = 0
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Consignment:
    """The `Outlet` of one push over a pair."""

    def __init__(self, pair: OutPair) -> None:
        self._pair = pair
        self._room = asyncio.Semaphore(AHEAD)
        self._numbers: list[int] = []

    async def message(self, item: KvFrame | HandoffEnd) -> bytes:
        """See `Outlet`."""
        if isinstance(item, HandoffEnd) or not len(item.payload):
            return encode_push_request(item)
        await self._pair.or_lost(self._room.acquire())
        number = self._pair.announce(item.payload, self._room.release)
        self._numbers.append(number)
        header = replace(item, payload=b"")
        return PUSH_REQUEST.encode(Announced(header, self._pair.number, number, len(item.payload)))

    def end(self) -> None:
        """End the push: drop its parcels."""
        self._pair.forget(self._numbers)


class InPairs:
    """The pairs that other processes opened with this one, by number."""

    def __init__(self, kind: LinkKind, host: str) -> None:
        self._kind, self._host = kind, host
        self._last = 0
        """Number of the newest pair."""
        self._pairs: dict[int, InPair] = {}
        self._closed = False

    async def serve(self, context: Context) -> None:
        """Serve one `Connect` call."""
        stream = _ContextStream(context)
        try:
            await self._pair_up(stream)
        except HackkvError as refusal:
            await stream.write(refusal)
        await outstay(context, CONNECT_TIMEOUT_S)

    async def take(self, announced: Announced) -> Payload:
        """Receive the payload of an announced frame.

        Raises `NodeLost` or `DeadlineExceeded`, and `FrameRefused` if there never was such a pair.
        """
        pair = self._pairs.get(announced.pair)
        if pair is None and 0 < announced.pair <= self._last:
            raise NodeLost(f"pair {announced.pair} is over")
        if pair is None:
            raise FrameRefused(f"pair {announced.pair} is not known here", reason="order")
        return await pair.take(announced.number, announced.size)

    async def close(self) -> None:
        """End every pair, and accept no more."""
        self._closed = True
        for pair in list(self._pairs.values()):
            await pair.close(NodeLost("the receiver is closing"))

    async def _pair_up(self, stream: _ContextStream) -> None:
        """Run one pair until it is over. Raises only errors from before the pair exists; a pair tells the peer its
        own."""
        if self._closed:
            raise NodeLost("the receiver is closed")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                hello = await stream.read()
        except TimeoutError as exc:
            raise DeadlineExceeded(f"no Hello came within {CONNECT_TIMEOUT_S:g} s") from exc
        if not isinstance(hello, Hello):
            raise HandshakeRefused(f"a pair must open with a Hello, not {type(hello).__name__}")
        if hello.dialect != self._kind.dialect:
            raise HandshakeRefused(f"link: {self._kind.dialect!r} here, {hello.dialect!r} at the peer")
        if len(self._pairs) >= 2 * MAX_PAIRS:
            raise Overloaded(f"{len(self._pairs)} processes are paired with this one already")
        self._last = number = self._last + 1
        pair = self._pairs[number] = InPair(self._kind.open(1, self._host), stream)
        try:
            pair.start()
            await pair.connect()
            pair.tell(Paired(number))
            await pair.wait_lost()
        except HackkvError as error:
            pair.lose(error)
        finally:
            del self._pairs[number]
            await pair.close(NodeLost("the sender went away"))


@dataclass(frozen=True, slots=True)
class _CallStream:
    """The sender's side of a `Connect` call."""

    call: ConnectCall
    address: str

    async def read(self) -> PairMessage:
        """See `PairStream`."""
        with translating(self.address):
            data = await self.call.read()
        if not isinstance(data, bytes):  # grpc.aio.EOF
            raise NodeLost(f"{self.address} ended the pair")
        return PAIR_MESSAGE.decode(data)

    async def write(self, message: PairMessage) -> None:
        """See `PairStream`. A message that nobody reads any more is dropped: `read` raises why."""
        with contextlib.suppress(NodeLost), translating(self.address):
            await self.call.write(PAIR_MESSAGE.encode(message))

    def end(self) -> None:
        """See `PairStream`."""
        self.call.cancel()


@dataclass(frozen=True, slots=True)
class _ContextStream:
    """The receiver's side of a `Connect` call."""

    context: Context

    async def read(self) -> PairMessage:
        """See `PairStream`."""
        return PAIR_MESSAGE.decode(await read_message(self.context))

    async def write(self, message: PairMessage) -> None:
        """See `PairStream`."""
        await answer(self.context, PAIR_MESSAGE.encode(message))

    def end(self) -> None:
        """See `PairStream`. The call ends with its handler."""
