"""One gRPC server per process: control services and the KV listener share its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from hackkv.errors import ConfigError, HandshakeRefused, Unauthorized
from hackkv.nodes import NodeInfo
from transport import health, methods
from transport.base import DecodeNode, Lend, PrefillNode, Registry
from transport.channels import BULK, Keepalive, server_options
from transport.closing import closing
from transport.coder import MessageCoder
from transport.convert import (
    ASSIGNMENT,
    DECODE_EVENT,
    DECODE_JOB,
    EMPTY,
    LEASE,
    NODE_INFO,
    PREFILL_EVENT,
    PREFILL_JOB,
    Assignment,
    Empty,
)
from transport.convert_kv import HANDOFF, encode_push_request
from transport.prefill_parts import in_parts
from transport.status import Context, abort, answer, reporting
from transport.trail import TRAIL, incoming
from transport.trunk_server import Calls, Method
from transport.trust import EVERYBODY, Trust

_WILDCARDS = frozenset({"", "0.0.0.0", "::", "[::]"})
_CLOSE_GRACE_S = 5.0

WIRE_KEY = "hackkv-wire"
"""Metadata key of a KV stream: the name of its wire; `PLAIN` if the key is missing."""
PLAIN = "grpc"
"""The wire whose payloads travel in the frames."""

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
T = TypeVar("T")


class _Table(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stub only
    """Finds the handler of a method by path; methods may be added while the server runs."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self.handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if not self._trust.knows(handler_call_details.invocation_metadata):
            return _STRANGER
        return self.handlers.get(handler_call_details.method)


async def _turn_away(_: AsyncIterator[bytes], context: Context) -> None:
    await abort(context, Unauthorized("this call does not show the cluster's token (internal.token_file)"))


# Handles every call without the token, whatever its kind, and reads none of its messages.
_STRANGER: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_turn_away)


class RpcServer:
    """Binds `host`:`port` (0: any free port) and serves the services that were added.

    `advertise_host` is the name that peers dial; it is needed when `host` is a wildcard.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        advertise_host: str | None = None,
        keepalive: Keepalive = BULK,
        trust: Trust = EVERYBODY,
    ) -> None:
        if advertise_host is None and host in _WILDCARDS:
            raise ConfigError(f"host {host!r} is a wildcard: set the advertised host that peers can dial")
        self._bind = f"{_bracketed(host or '::')}:{port}"
        self._advertise_host = _bracketed(advertise_host or host)
        self._options = server_options(keepalive)
        self._trust = trust
        self._table = _Table(trust)
        self._server: grpc.aio.Server | None = None
        self._address: str | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._streams: dict[tuple[str, str], Callable[[Context], Awaitable[None]]] = {}

    @property
    def host(self) -> str:
        """The name at which peers reach this process."""
        return self._advertise_host

    def add_prefill(self, node: PrefillNode) -> None:
        """Serve a prefill node."""

        async def assign(ask: Assignment) -> Empty:
            await node.assign(ask.transfer_id, ask.epoch, ask.decode_address, ask.held)
            return Empty()

        async def describe(_: Empty) -> NodeInfo:
            return await node.describe()

        self._add_calls(Method(methods.PREFILL_SERVE, PREFILL_JOB, PREFILL_EVENT, node.prefill, in_parts))
        self._add_unary(methods.PREFILL_ASSIGN, ASSIGNMENT, EMPTY, assign)
        self._add_unary(methods.PREFILL_DESCRIBE, EMPTY, NODE_INFO, describe)

    def add_decode(self, node: DecodeNode) -> None:
        """Serve a decode node."""

        async def describe(_: Empty) -> NodeInfo:
            return await node.describe()

        self._add_calls(Method(methods.DECODE_SERVE, DECODE_JOB, DECODE_EVENT, node.decode))
        self._add_unary(methods.DECODE_DESCRIBE, EMPTY, NODE_INFO, describe)

    def add_lender(self, lend: Lend) -> None:
        """Serve the pages that a decode node lends. Each listener of the node calls this; the last call counts."""
        self._add_stream(methods.KV_FETCH, HANDOFF.decode, encode_push_request, lend)

    def add_registry(self, registry: Registry) -> None:
        """Serve the router's registry."""
        self._add_unary(methods.REGISTRY_REGISTER, NODE_INFO, LEASE, registry.register)

    def add_stream(self, method: str, wire: str, handle: Callable[[Context], Awaitable[None]]) -> None:
        """Serve the streams of one wire: calls that carry its name (`WIRE_KEY`). The wire's listener calls this."""
        self._streams[method, wire] = handle

        # grpc.aio takes a two-argument coroutine function for a reader and writer of messages; the first is unused.
        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            await self._run(context, method, self._of_wire(method, context))

        self._table.handlers[method] = grpc.stream_stream_rpc_method_handler(serve)

    async def start(self) -> str:
        """Bind and serve; return the address that peers dial. Starting twice returns the same address.

        Raises `ConfigError`, naming the address, if it cannot be bound.
        """
        if self._address is not None:
            return self._address
        server = grpc.aio.server(handlers=(health.HANDLER, self._table), options=self._options)
        try:
            port = self._trust.bind(server, self._bind)
        except RuntimeError as exc:
            await server.stop(None)
            raise ConfigError(f"cannot listen on {self._bind}: {exc}") from exc
        await server.start()
        self._server = server
        self._address = f"{self._advertise_host}:{port}"
        return self._address

    async def __aenter__(self) -> RpcServer:
        """Return the server, which is not started yet. It is closed at the end, also if the body fails."""
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening and cancel every call; returns when the services' generators have been closed."""
        if self._server is None:
            return
        server, self._server, self._address = self._server, None, None
        calls = set(self._calls)
        await server.stop(None)
        if calls:
            _, late = await asyncio.wait(calls, timeout=_CLOSE_GRACE_S)
            for task in late:
                task.cancel()

    def _add_unary(
        self,
        method: str,
        request: MessageCoder[Asked, Any],
        response: MessageCoder[Answered, Any],
        call: Callable[[Asked], Awaitable[Answered]],
    ) -> None:
        async def handler(data: bytes, context: Context) -> bytes:
            async def work() -> bytes:
                return response.encode(await call(request.decode(data)))

            return await self._run(context, method, work())

        self._table.handlers[method] = grpc.unary_unary_rpc_method_handler(handler)

    def _add_calls(self, method: Method[Any, Any]) -> None:
        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            await self._run(context, method.path, Calls(method, context).run())

        self._table.handlers[method.path] = grpc.stream_stream_rpc_method_handler(serve)

    def _add_stream(
        self,
        method: str,
        decode: Callable[[bytes], Asked],
        encode: Callable[[Answered], bytes],
        call: Callable[[Asked], AsyncIterator[Answered]],
    ) -> None:
        # A coroutine that writes, not a generator: cancelling it while gRPC sends still closes the service's generator.
        async def handler(data: bytes, context: Context) -> None:
            async def work() -> None:
                async with closing(call(decode(data))) as events:
                    async for event in events:
                        await answer(context, encode(event))

            await self._run(context, method, work())

        self._table.handlers[method] = grpc.unary_stream_rpc_method_handler(handler)

    async def _of_wire(self, method: str, context: Context) -> None:
        wire = next((value for key, value in context.invocation_metadata() or () if key == WIRE_KEY), PLAIN)
        handle = self._streams.get((method, str(wire)))
        if handle is None:
            raise HandshakeRefused(f"wire: {wire!r} is none of this node's")
        await handle(context)

    async def _run(self, context: Context, method: str, work: Awaitable[T]) -> T:
        """Do the work of one call: errors go to the peer, and `close` waits for its end."""
        TRAIL.set(incoming(context.invocation_metadata() or ()))  # each call of gRPC has a task of its own
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        return await reporting(context, method, work)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
