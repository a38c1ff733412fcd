"""Both ends of a pair: a link, the thread that it blocks, and the gRPC stream by which the ends agree.

    sender    Hello .. keys .......................... parcel            over the link
    receiver  ........ keys .. Paired .. Ready ................ Ready    over the stream

Handoffs announce parcels on their own streams. The receiver posts a parcel and says `Ready`; the sender sends that
parcel next. So both ends keep one order, and neither waits in a link for a peer that does not come. A `Ready` is always
answered with as many bytes, even if the handoff is over by then. So a cancelled handoff does not break the pair for
others: a link ends only with its peer, its stream or a deadline. A lost pair is not repaired: the next push makes
another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Condition
from typing import Any, ClassVar, Final, Protocol, TypeVar

from hackkv.errors import HackkvError, NodeLost, TransferError
from hackkv.types import Payload
from transport.closing import reap
from transport.convert_pair import Hello, Paired, PairKey, PairMessage, Ready
from transport.link import CONNECT_TIMEOUT_S, Link
from transport.status import internal

T = TypeVar("T")

POSTED: Final = 2
"""Parcels that a receiver expects at once on a pair: the next one is under way while one is read."""
MAX_KEYS: Final = 64
MAX_READY: Final = 64
"""`Ready` messages that a sender queues: more than any receiver posts."""


class PairStream(Protocol):
    """The messages of a `Connect` call, at either end."""

    async def read(self) -> PairMessage:
        """The next message of the peer. Raises `NodeLost` when the peer has gone."""
        ...

    async def write(self, message: PairMessage) -> None:
        """Send a message. Raises `NodeLost` when the peer has gone."""
        ...

    def end(self) -> None:
        """End the call: the pair is over."""
        ...


class Pair:
    """The base of both ends of a pair. It belongs to the event loop that made it."""

    tells_why: ClassVar[bool]
    """Whether the peer is told the reason for which this end gives the pair up."""

    def __init__(self, link: Link, stream: PairStream) -> None:
        self._link, self._stream = link, stream
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[PairMessage] = asyncio.Queue()
        self._keys = _Keys(lambda key: self._loop.call_soon_threadsafe(self.tell, key))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="link")
        self._lost: asyncio.Future[HackkvError] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the pair is over."""
        return self._lost.done()

    def start(self) -> None:
        """Start to send and receive messages."""
        self._writing = self._start(self._write())
        self._start(self._read())

    async def close(self, reason: HackkvError) -> None:
        """End the pair, and wait until its tasks are over. If the pair was lost before, its first reason stays."""
        self.lose(reason)
        if self._writing:
            await asyncio.wait({self._writing}, timeout=CONNECT_TIMEOUT_S)
        if self._tasks:
            await reap(*self._tasks)

    async def connect(self) -> None:
        """Connect the link. Raises the reason if the pair is lost before."""
        await self.or_lost(self._in_thread(self._link.connect, self._keys))

    async def wait_lost(self) -> HackkvError:
        """Wait for the end of the pair; return the reason."""
        return await asyncio.shield(self._lost)

    async def or_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`. If the pair is lost before, cancels `work` and raises the reason."""
        task = asyncio.create_task(work)
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise self._lost.result()
            return task.result()
        finally:
            await reap(task)

    def lose(self, reason: HackkvError) -> None:
        """End the pair, once. All that wait for it get `reason`."""
        if not self._lost.done():
            self._lost.set_result(reason)
            self._keys.close()
            self._link.abort()
            self._thread.shutdown(wait=False)
            self.tell(reason)
            self._stream.end()
            for task in self._tasks:
                if task is not self._writing or not self.tells_why:  # a write that is cancelled spoils the stream
                    task.cancel()

    def tell(self, message: PairMessage) -> None:
        """Queue a message for the peer."""
        self._outbox.put_nowait(message)

    def receive(self, message: PairMessage) -> None:
        """Take a message of the peer. An error that this raises ends the pair."""
        match message:
            case PairKey(name, value):
                self._keys.arrive(name, value)
            case HackkvError():
                raise message
            case _:
                raise TransferError(f"a pair takes no {type(message).__name__} here")

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of the pair. Its failure ends the pair, and the end of the pair cancels the task."""

        def over(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.lose(error if isinstance(error, HackkvError) else internal(error, "a pair of links"))

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(over)
        return task

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call of the link in its thread."""
        if self.lost:
            raise self._lost.result()
        return await self._loop.run_in_executor(self._thread, work, *args)

    async def _read(self) -> None:
        while True:
            self.receive(await self._stream.read())

    async def _write(self) -> None:
        said: PairMessage | None = None
        while not isinstance(said, HackkvError):
            said = await self._outbox.get()
            await self._stream.write(said)


@dataclass(frozen=True, slots=True)
class _Parcel:
    payload: Payload
    sent: Callable[[], None]


class OutPair(Pair):
    """The sender's end. It ends by cancelling its call; a write to a call that had not begun would wait forever."""

    tells_why = False

    def __init__(self, link: Link, stream: PairStream) -> None:
        super().__init__(link, stream)
        self._numbers = count(1)
        self._announced: dict[int, _Parcel] = {}
        self._ready: asyncio.Queue[Ready] = asyncio.Queue(MAX_READY)
        self._paired = asyncio.Event()
        self.number = 0
        """The receiver's number of the pair."""

    async def open(self, hello: Hello) -> None:
        """Meet the receiver. Raises its refusal word for word."""
        self.tell(hello)
        await self.connect()
        await self.or_lost(self._paired.wait())
        self._start(self._send())

    def announce(self, payload: Payload, sent: Callable[[], None]) -> int:
        """Keep a parcel until the receiver is ready for it; return its number. `sent` is called once it is sent."""
        number = next(self._numbers)
        self._announced[number] = _Parcel(payload, sent)
        return number

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop parcels of a handoff that is over. If the receiver waits for one of them, it gets zeros instead."""
        for number in numbers:
            self._announced.pop(number, None)

    def receive(self, message: PairMessage) -> None:
        """See `Pair.receive`."""
        match message:
            case Paired(pair):
                self.number = pair
                self._paired.set()
            case Ready():
                if self._ready.full():
                    raise TransferError(f"the receiver is ready for more than {MAX_READY} parcels at once")
                self._ready.put_nowait(message)
            case _:
                super().receive(message)

    async def _send(self) -> None:
        while True:
            ready = await self._ready.get()
            parcel = self._announced.pop(ready.number, None)
            payload = parcel.payload if parcel else bytes(ready.size)
            if len(payload) != ready.size:
                raise TransferError(f"parcel {ready.number} has {len(payload)} bytes, the receiver wants {ready.size}")
            await self._in_thread(self._link.send, payload)
            if parcel:
                parcel.sent()


class InPair(Pair):
    """The receiver's end."""

    tells_why = True

    def __init__(self, link: Link, stream: PairStream) -> None:
        super().__init__(link, stream)
        self._places = asyncio.Semaphore(POSTED)

    async def take(self, number: int, size: int) -> Payload:
        """Receive a parcel that was announced. Raises the reason if the pair is lost before.

        If the caller is cancelled, the pair receives the parcel and drops it.
        """
        return await self.or_lost(self._take(number, size))

    async def _take(self, number: int, size: int) -> Payload:
        await self._places.acquire()
        # Tasks run up to their first wait in the order in which they start, so parcels are posted in order.
        arriving = self._start(self._arrive(number, size))
        return await asyncio.shield(arriving)

    async def _arrive(self, number: int, size: int) -> Payload:
        try:
            arrived = self._link.post(size)
            self.tell(Ready(number, size))
            return await self._in_thread(arrived)
        finally:
            self._places.release()


class _Keys:
    """The `Exchange` of a pair."""

    def __init__(self, tell: Callable[[PairKey], object]) -> None:
        self._tell = tell
        self._said: dict[str, bytes] = {}
        self._closed = False
        self._news = Condition()

    def put(self, name: str, value: bytes) -> None:
        """See `Exchange`."""
        self.arrive(name, value)
        self._tell(PairKey(name, value))

    def get(self, name: str) -> bytes:
        """See `Exchange`."""
        with self._news:
            self._news.wait_for(lambda: name in self._said or self._closed, CONNECT_TIMEOUT_S)
            if name not in self._said:
                raise NodeLost(f"the peer's {name} did not come" if not self._closed else "the pair is closed")
            return self._said[name]

    def arrive(self, name: str, value: bytes) -> None:
        """Keep a value that either end has put."""
        with self._news:
            if len(self._said) >= MAX_KEYS:
                raise TransferError(f"a pair exchanges at most {MAX_KEYS} keys")
            self._said[name] = value
            self._news.notify_all()

    def close(self) -> None:
        """Let every `get` of a missing value raise: no more values come."""
        with self._news:
            self._closed = True
            self._news.notify_all()
