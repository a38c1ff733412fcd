"""The HTTP API of one process, over a fleet that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from hackkv.heap import trim
from hackkv.tokenizer import Tokenizer
from node.spans import open_spans
from router.api.app import build_app
from router.api.connection import BoundedHttp, Census, Network, Waits
from router.api.defaults import read_sampling_defaults
from router.api.served import serve_model
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.watch.journal import Journal
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient

_BACKLOG = 2048
_LAST_BYTES_S = 1
"""Time for answers that are complete to reach clients that read slowly."""


def make_fleet(config: RouterConfig, channels: ChannelPool) -> Fleet:
    """A fleet without nodes, which are dialled over `channels`."""
    return Fleet(
        lambda address: PrefillClient(address, channels),
        lambda address: DecodeClient(address, channels),
        lease_ttl_s=config.lease_ttl_s,
        limits=config.limits,
        remember_s=config.deadlines.queue_s,
        by_prefix=config.prefix_dispatch,
    )


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handler would end the process with the signal's exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


class Front:
    """The HTTP API of one served model. `close` ends what it has started."""

    def __init__(self, config: RouterConfig, fleet: Fleet, journal: Journal) -> None:
        """Reads the files that the configuration names; raises `ConfigError` if something is wrong with them."""
        api_keys, tokenizer = config.keys(), Tokenizer(config.model)
        self.journal, self._config = journal, config
        self.grace_s = config.shutdown_grace_s
        """Time that requests in flight get when `serve` is told to stop."""
        self._served = serve_model(
            config.model_name,
            tokenizer,
            fleet,
            read_sampling_defaults(config.model),
            config.deadlines,
            config.limits,
            chat=config.chat,
            strict=config.strict,
            journal=journal,
        )
        self._spans = open_spans(config.traces, "router", config.node_id or "router")
        self._app = build_app(
            self._served,
            api_keys,
            config.limits.max_body_bytes,
            config.deadlines.body_s,
            cors_origins=config.cors_origins,
            spans=self._spans,
        )
        self._served.prompts.parsers.fork()

    async def open(self, http: socket.socket) -> None:
        """Listen. Connections wait until `serve` takes them."""
        http.listen(_BACKLOG)
        trim()

    async def serve(self, http: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop`, then finish what is in flight. Probes and new requests hear meanwhile that it stops."""
        limits, deadlines = self._config.limits, self._config.deadlines
        waits = Waits(deadlines.head_s, deadlines.write_s)
        census = Census(limits.max_connections, limits.max_connections_per_address, self._config.proxies)
        connections = partial(BoundedHttp, census, waits, self._served.metrics.refused)
        server = make_server(self._app, connections, self._config.proxies, deadlines.idle_s)

        async def stop_server() -> None:
            await stop.wait()
            await self._served.dispatcher.close(self.grace_s)
            server.should_exit = True

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._served.prompts.parsers.start())
            stopper = tasks.create_task(stop_server())
            await server.serve(sockets=[http])
            stopper.cancel()

    async def close(self) -> None:
        """End the processes that it has started, and send the last spans."""
        await self._served.prompts.parsers.close()
        await self._served.grammars.close()
        await self._spans.close()


def make_server(
    app: ASGIApp, connections: Callable[..., asyncio.Protocol], proxies: tuple[Network, ...], idle_s: float
) -> uvicorn.Server:
    """An HTTP server whose connections `connections` makes. Only `proxies` may say for which client they speak.
    `idle_s`: how long a connection may wait for its next request."""
    config = uvicorn.Config(
        app,
        http=connections,  # type: ignore[arg-type]  # uvicorn calls it; it need not be a class
        ws="none",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=idle_s,  # type: ignore[arg-type]  # goes to `call_later`, which takes fractions of a second
        timeout_graceful_shutdown=_LAST_BYTES_S,
        forwarded_allow_ips=[*map(str, proxies), *map(_mapped, proxies)],
    )
    return _Server(config)


def _mapped(network: Network) -> str:
    """A network as a socket of IPv6 sees it, where peers that speak IPv4 have mapped addresses."""
    if network.version == 6:
        return str(network)
    return f"::ffff:{network.network_address}/{96 + network.prefixlen}"


def allow_many_sockets() -> None:
    """Allow as many open files as the system grants: each connection is one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS grants less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def beside(one: socket.socket) -> socket.socket:
    """Another socket at the address of `one`, which shares connections with those that listen there.

    Only this user's processes can open one, and only because `one` allows it from now on: it was bound alone.
    """
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other = socket.socket(one.family, one.type, one.proto)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind(one.getsockname())
    return other


def url_of(http: socket.socket, advertise_host: str | None) -> str:
    """The address of a listening socket, for clients."""
    host, port = http.getsockname()[:2]
    name = advertise_host or host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
