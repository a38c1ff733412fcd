"""gRPC connections: their options, and one channel per address.

A dead peer is noticed within `Keepalive.time_s + Keepalive.timeout_s`, with or without calls under way. That is 5 s for
clients of control calls, and 11 s (`BULK`) for servers and for connections that move KV. On a slow link an answer waits
behind all KV in flight. So KV in flight is bounded too (`WINDOW_BYTES`): otherwise a busy peer would look dead. On a
link of 2 Mbit/s control calls can wait behind three handoffs.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

from hackkv.errors import NodeLost
from transport.coder import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from transport.status import translating
from transport.trunk import Stream, Trunk
from transport.trust import EVERYBODY, Metadata, Trust

MAX_METADATA_BYTES = 96 << 10
"""Room for a failure: 16,000 characters of up to 4 bytes, and base64 on the way."""

WINDOW_BYTES = 256 << 10
"""Bytes that a stream may have in flight beyond the message that its receiver asked for: 1 s at 2 Mbit/s, 0.2 ms at
10 Gbit/s. gRPC would otherwise measure a window, queues included, and let the window grow without bound."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Ping an idle or silent peer every `time_s`; without an answer in `timeout_s` the connection is dead. Seconds."""

    timeout_s: float
    time_s: float = 1.0

    def options(self) -> list[tuple[str, int]]:
        """The gRPC channel arguments, for either end."""
        time_ms, timeout_ms = round(self.time_s * 1000), round(self.timeout_s * 1000)
        return [
            ("grpc.keepalive_time_ms", time_ms),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # gRPC applies this timeout instead of keepalive's once other data has come. Its default is 60 s.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", time_ms // 2),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ]


CONTROL = Keepalive(timeout_s=4.0)
"""For clients of control calls."""

BULK = Keepalive(timeout_s=10.0)
"""For connections that KV may fill, on either end."""


def client_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    """Channel arguments of a client."""
    return [
        *keepalive.options(),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        # A new channel must make a new connection attempt and not inherit the back-off of an earlier one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # the router re-places requests; a second copy of a job must never start silently
        ("grpc.min_reconnect_backoff_ms", 2000),  # this also bounds one connection attempt (default 20 s)
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def server_options(keepalive: Keepalive) -> list[tuple[str, int]]:
    """Channel arguments of a server."""
    return [
        *keepalive.options(),
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        # The default lets a second process share the port and take half of its connections.
        ("grpc.so_reuseport", 0),
    ]


class ChannelPool:
    """One connection per address, opened on first use and replaced when it has failed."""

    def __init__(self, keepalive: Keepalive = CONTROL, trust: Trust = EVERYBODY) -> None:
        self._options = client_options(keepalive)
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._trunks: dict[tuple[str, str], Trunk] = {}
        self._closed = False

    async def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to `address`. Raises `NodeLost` once the pool is closed.

        A failed channel refuses calls until its back-off ends, even if the peer is back. So a failed channel is
        replaced, and every call makes its own attempt. No call can be under way on a failed channel.
        """
        if self._closed:
            raise NodeLost(f"{address}: the client is closed")
        known = self._channels.get(address)
        if known is not None and known.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return known
        fresh = self._channels[address] = self._trust.dial(address, self._options)
        if known is not None:
            await known.close(None)
        return fresh

    async def trunk(self, address: str, method: str) -> Trunk:
        """The stream for calls of `method` at `address`; a new one if there is none. Raises `NodeLost`."""
        channel = await self.get(address)
        known = self._trunks.get((address, method))
        if known is not None and not known.lost:
            return known
        with translating(address):
            stream: Stream = channel.stream_stream(method, None, None)(None, metadata=self.metadata)
        fresh = self._trunks[address, method] = Trunk(stream, address)
        return fresh

    @property
    def metadata(self) -> Metadata:
        """Metadata that every call on these channels must carry."""
        return self._trust.metadata

    async def close(self) -> None:
        """Drop every connection; calls under way fail with `NodeLost`. Closing twice is fine."""
        self._closed = True
        while self._trunks:
            _, trunk = self._trunks.popitem()
            await trunk.close()
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(None)
