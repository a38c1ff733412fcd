"""The router process: HTTP, the registry's gRPC server and the fleet's housekeeping on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from hackkv.errors import ConfigError
from hackkv.tokenizer import Tokenizer
from hackkv.types import Role
from node.announcement import announce
from node.spans import open_spans
from router.api.app import build_app
from router.api.connection import BoundedHttp, Census, Network, Waits
from router.api.defaults import read_sampling_defaults
from router.api.served import serve_model
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient
from transport.rpc_server import RpcServer
from transport.trust import load_trust

_BACKLOG = 2048
_LAST_BYTES_S = 1
"""Time for answers that are complete to reach clients that read slowly."""


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handler would end the process with the signal's exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises `ConfigError` before any port is open if something is wrong with the files."""
    _allow_many_sockets()
    api_keys = config.keys()
    tokenizer = Tokenizer(config.model)
    trust = load_trust(config.internal, config.control.host)
    channels = ChannelPool(trust=trust)
    fleet = Fleet(
        lambda address: PrefillClient(address, channels),
        lambda address: DecodeClient(address, channels),
        lease_ttl_s=config.lease_ttl_s,
        limits=config.limits,
        remember_s=config.deadlines.queue_s,
        by_prefix=config.prefix_dispatch,
    )
    defaults = read_sampling_defaults(config.model)
    served = serve_model(
        config.model_name,
        tokenizer,
        fleet,
        defaults,
        config.deadlines,
        config.limits,
        chat=config.chat,
        strict=config.strict,
        trace_link=config.trace_link,
    )
    spans = open_spans(config.traces, "router", config.node_id or "router")
    app = build_app(
        served,
        api_keys,
        config.limits.max_body_bytes,
        config.deadlines.body_s,
        cors_origins=config.cors_origins,
        spans=spans,
    )
    control = RpcServer(
        config.control.host, config.control.port, advertise_host=config.control.advertise_host, trust=trust
    )
    control.add_registry(fleet.nodes)
    static = tuple(
        (role, address)
        for role, addresses in ((Role.PREFILL, config.nodes.prefill), (Role.DECODE, config.nodes.decode))
        for address in addresses
    )
    http = _bind(config.listen.host, config.listen.port)
    try:
        control_address = await control.start()
        announce(http=_url(http, config.listen.advertise_host), control=control_address)
        connections = partial(
            BoundedHttp,
            Census(config.limits.max_connections, config.limits.max_connections_per_address, config.proxies),
            Waits(config.deadlines.head_s, config.deadlines.write_s),
            served.metrics.refused,
        )
        async with asyncio.TaskGroup() as tasks:
            housekeeping = [tasks.create_task(fleet.nodes.run(static)), tasks.create_task(served.journal.run())]
            tasks.create_task(served.prompts.parsers.start())
            server = make_server(app, connections, config.proxies)
            await _serve_http(server, http, stop, lambda: served.dispatcher.close(config.shutdown_grace_s))
            for task in housekeeping:
                task.cancel()
    finally:
        http.close()
        await served.prompts.parsers.close()
        await served.grammars.close()
        await control.close()
        await channels.close()
        await spans.close()


def make_server(
    app: ASGIApp, connections: Callable[..., asyncio.Protocol], proxies: tuple[Network, ...]
) -> uvicorn.Server:
    """A server of HTTP whose connections `connections` makes. Only `proxies` may say for whom they speak."""
    config = uvicorn.Config(
        app,
        http=connections,  # type: ignore[arg-type]  # uvicorn calls it; it need not be a class
        ws="none",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_LAST_BYTES_S,
        forwarded_allow_ips=[str(network) for network in proxies],
    )
    return _Server(config)


async def _serve_http(
    server: uvicorn.Server, http: socket.socket, stop: asyncio.Event, close: Callable[[], Awaitable[None]]
) -> None:
    """Serve until `stop`, then until `close` has ended. In between, probes and new requests hear that it stops."""

    async def stop_server() -> None:
        await stop.wait()
        await close()
        server.should_exit = True

    async with asyncio.TaskGroup() as tasks:
        stopper = tasks.create_task(stop_server())
        await server.serve(sockets=[http])
        stopper.cancel()


def _allow_many_sockets() -> None:
    """As many open files as the system grants: each connection is one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS grants less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    The protocol is named because asyncio switches Nagle's algorithm off only for sockets that name TCP, and those of
    `socket.create_server` do not. Otherwise the end of every response would wait 40 ms for the client's delayed ACK.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"listen: cannot bind {host}:{port}: {error.strerror or error}") from error
    return listener


def _url(http: socket.socket, advertise_host: str | None) -> str:
    host, port = http.getsockname()[:2]
    name = advertise_host or host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
