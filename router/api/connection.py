"""HTTP connections: uvicorn's protocol, with an end to every wait and a bound on everything that a peer can pile up.

- A request's headers have a deadline, from the connection's first moment or the request's first byte.
- Connections are counted, all of them and those of each address (`Census`). Where there are too many, those that wait
  for a next request are closed first.
- A read takes 64 KiB, and chunks have a least size on average, so that no read keeps the event loop busy.
- A client that has sent its request may close its side and still gets its answer. One that has left altogether looks
  the same at first. So it is sent `100 Continue` now and then, or a comment within a stream of events. A client ignores
  both, and a closed socket refuses them.
- A client that is refused in the middle of its body can read why: the rest of the body is dropped for a while.
- A client that takes nothing of its answer is given up.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from node.logs import ACCESS, FIELDS
from router.api.errors import HTTPError, told
from router.api.gathered import Gathered
from router.api.intake import name_headers, name_request

log = logging.getLogger(ACCESS)

READ_BYTES: Final = 1 << 16
MAX_HEAD_BYTES: Final = 64 << 10
LEAST_CHUNK: Final = 64
"""Bytes of a chunk, on average, after the first `FREE_CHUNKS`."""
FREE_CHUNKS: Final = 1024
LINGER_S: Final = 10.0
"""Seconds for which the body of a refused request is read and dropped."""
FIRST_PROBE_S, LAST_PROBE_S = 0.02, 1.0

LONGEST_FAULT: Final = 200
"""The longest text, in characters, about bytes that are not HTTP: h11 repeats the bytes."""

WRITE: Final = "hackkv.write"
"""An ASGI extension: a function that writes a piece of a stream of events, and does not wait as `send` may. It returns
False, and does nothing, where it would have to wait or where the answer is no such stream."""

_REMEMBERED: Final = 4096
"""Addresses whose owners need not be found again."""

Network = IPv4Network | IPv6Network


HangUp = Callable[[], None]
"""Closes a connection that waits for its next request."""


class Census:
    """Connections now, by address."""

    def __init__(self, most: int, most_per_address: int, proxies: Sequence[Network]) -> None:
        """See `LimitsConfig`. Connections from `proxies` count only towards `most`."""
        self._most, self._most_per_address, self._proxies = most, most_per_address, tuple(proxies)
        self._by_owner: Counter[str] = Counter()
        self._idle: dict[HangUp, str] = {}
        """The connections between two requests, and their owners. The one that has waited longest comes first."""
        self._owner = lru_cache(_REMEMBERED)(self._find_owner)
        self.total = 0

    def enter(self, address: str) -> HTTPError | None:
        """Count a connection. If there are too many, one that waits is closed for it. Returns the reason to refuse it,
        if there is one; `leave` follows in any case."""
        owner = self._owner(address)
        self.total += 1
        self._by_owner[owner] += 1
        if owner and self._by_owner[owner] > self._most_per_address:
            if not self._hang_up_one(owner):
                return HTTPError(429, f"too many connections from {owner}", "too_many_connections")
        elif self.total > self._most and not self._hang_up_one(None):
            return HTTPError(503, "too many connections", "too_many_connections")
        return None

    def rest(self, address: str, hang_up: HangUp) -> None:
        """A connection waits for its next request, and may be hung up on."""
        self._idle[hang_up] = self._owner(address)

    def wake(self, hang_up: HangUp) -> None:
        """A connection no longer waits."""
        self._idle.pop(hang_up, None)

    def leave(self, address: str) -> None:
        """A connection is gone."""
        owner = self._owner(address)
        self.total -= 1
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _hang_up_one(self, of: str | None) -> bool:
        """Close the connection that has waited longest for a request, of one owner or (None) of all. False: none
        waits."""
        for hang_up, owner in self._idle.items():
            if of in (None, owner):
                del self._idle[hang_up]
                hang_up()
                return True
        return False

    def _find_owner(self, address: str) -> str:
        """The owner of a connection's share: an address, or an IPv6 network, which one client owns. "": nobody."""
        try:
            given = ip_address(address.partition("%")[0])
        except ValueError:
            return ""
        plain = getattr(given, "ipv4_mapped", None) or given
        if any(plain.version == network.version and plain in network for network in self._proxies):
            return ""
        return str(plain) if plain.version == 4 else str(ip_network((int(plain), 64), strict=False))


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a connection waits for its peer."""

    head_s: float
    write_s: float


class _Requests(h11.Connection):
    """h11's parser, which also refuses bodies in crumbs: each chunk costs time, however small it is."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._chunks, self._bytes = 0, 0
        self.fault = h11.RemoteProtocolError("no HTTP")
        """Why the peer was not understood, if it was not."""

    def next_event(self) -> Any:
        try:
            return self._counted(super().next_event())
        except h11.RemoteProtocolError as error:
            self.fault = error
            raise

    def _counted(self, event: Any) -> Any:
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS and self._bytes < LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


def _chunk(data: bytes) -> bytes:
    """A piece of a chunked answer (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class BoundedHttp(H11Protocol, asyncio.BufferedProtocol):
    """One connection."""

    _buffer: Final = bytearray(READ_BYTES)
    """Memory that all connections share. Bytes read into it are taken out before the event loop reads again."""

    def __init__(self, census: Census, waits: Waits, refused: Callable[[int], None], **given: Any) -> None:
        """`refused` is called with the status of each refusal; `given` is what uvicorn gives its protocols."""
        super().__init__(**given)
        self.conn: _Requests = _Requests()
        self.app = self._noting_events
        self._streams_events = self._chunked = False
        self._census, self._waits, self._refused = census, waits, refused
        self._address = ""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._deaf = False
        """Whether everything that still comes is dropped."""

    # What asyncio calls ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Gathered(transport, self.loop))
        self._address = self.client[0] if self.client else ""
        if error := self._census.enter(self._address):
            self._refuse(error)
            self.transport.close()
        else:
            self._arm("head", self._waits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in tuple(self._timers):
            self._disarm(name)
        self._census.wake(self.timeout_keep_alive_handler)
        self._census.leave(self._address)
        super().connection_lost(exc)
        self.app = self.config.loaded_app  # our own method would be a cycle, for the garbage collector to find

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        self._census.wake(self.timeout_keep_alive_handler)
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        if self._deaf or self._has_request:
            self._disarm("head")
        elif self.conn.their_state is not h11.SEND_BODY:  # a new request has begun, or a dropped body is over
            self._disarm("linger")
            if "head" not in self._timers:
                self._arm("head", self._waits.head_s, self._head_is_late)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The peer sends no more. True keeps our own side open."""
        answerable = self._has_request and not self.cycle.more_body and self.cycle.scope["http_version"] != "1.0"
        if answerable and not self._deaf:
            self.cycle.keep_alive = False
            self._probe(FIRST_PROBE_S)
        return answerable and not self._deaf

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm("write", self._waits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm("write")

    # What uvicorn calls ---------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._arm("linger", LINGER_S, self._half_close)
        elif self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._census.rest(self._address, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """The peer does not speak HTTP, or its headers are too long. It is told what h11 says, and not `msg`."""
        status = HTTPStatus(self.conn.fault.error_status_hint)
        if status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(HTTPError(status, f"the headers are longer than {MAX_HEAD_BYTES} bytes", "long_head"))
        else:
            self._refuse(HTTPError(status, f"this is not HTTP/1.1: {self.conn.fault}"[:LONGEST_FAULT], "bad_http"))
        self._half_close()

    # Our own --------------------------------------------------------------------------------------------------------

    @property
    def _has_request(self) -> bool:
        """Whether a request has all its headers and waits for the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _probe(self, pause_s: float) -> None:
        """Write something that a peer ignores, and that fails if the peer has left: `100 Continue` before an answer, a
        comment between the events of a stream."""
        if not self._has_request or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif self._streams_events:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._arm("probe", pause_s, lambda: self._probe(min(2 * pause_s, LAST_PROBE_S)))

    async def _noting_events(self, scope: Any, receive: Any, send: Any) -> None:
        """The application; notes whether its answer is a stream of events, and writes the pieces of a stream itself."""

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                self._streams_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
                self._chunked = self._streams_events and scope["http_version"] != "1.0"
            elif self._chunked and message.get("more_body"):
                await self._write_chunk(message.get("body", b""))
                return
            await send(message)

        extensions = scope.setdefault("extensions", {})
        extensions[WRITE] = self._write_now
        try:
            await self.config.loaded_app(scope, receive, noting)
        finally:
            del extensions[WRITE]  # our own method would be a cycle, for the garbage collector to find

    async def _write_chunk(self, data: bytes) -> None:
        """Do what h11 does with a piece of a chunked answer, in a tenth of the time: the states remain as they are."""
        cycle = self.cycle
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if not cycle.disconnected and data:
            self.transport.write(_chunk(data))

    def _write_now(self, data: bytes) -> bool:
        """See `WRITE`."""
        if not self._chunked or self.flow.write_paused or self.cycle.disconnected or not data:
            return False
        self.transport.write(_chunk(data))
        return True

    def _head_is_late(self) -> None:
        self._refuse(HTTPError(408, "the request's headers did not arrive in time", "request_timeout"))
        self.transport.close()

    def _refuse(self, error: HTTPError) -> None:
        """Say what is wrong with the connection, unless an answer has begun: this would be taken for a part of it."""
        self._refused(error.status)
        if self._has_request and self.cycle.response_started:
            return
        scope: Any = self.cycle.scope if self._has_request else {"headers": (), "path": None}
        path, name = scope["path"], name_request(scope)
        body = json.dumps(told(error, path, name)).encode("ascii")
        head = f"HTTP/1.1 {error.status:d} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        head += "".join(f"{header}: {name}\r\n" for header in name_headers(path))
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        fields = {"request_id": name, "address": self._address, "status": error.status}
        log.info("refused %s: %s", self._address, error, extra={FIELDS: fields})

    def _half_close(self) -> None:
        """Close our side, and drop for a while what still comes: hanging up would take back what was just written."""
        self._deaf = True
        self._unset_keepalive_if_required()
        if self._has_request:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.transport.resume_reading()
        self._arm("linger", LINGER_S, self.transport.abort)

    def _arm(self, name: str, seconds: float, ring: Callable[[], None]) -> None:
        self._disarm(name)

        def rung() -> None:
            self._timers.pop(name, None)
            ring()

        self._timers[name] = self.loop.call_later(seconds, rung)

    def _disarm(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()
