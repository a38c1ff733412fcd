"""The router process: HTTP, the registry's gRPC server and the fleet's housekeeping on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from hackkv.errors import ConfigError
from hackkv.tokenizer import Tokenizer
from hackkv.types import Role
from router.app import build_app
from router.attempt import Deadlines
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.generation import Backend, PromptLimits
from router.metrics import Metrics
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient
from transport.rpc_server import RpcServer

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handler would end the process with the signal's exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


async def serve(config: RouterConfig, tokenizer: Tokenizer) -> None:
    """Run until SIGTERM or SIGINT. Raises `ConfigError` if an address cannot be bound."""
    api_keys = config.keys()
    channels = ChannelPool()
    fleet = Fleet(
        lambda address: PrefillClient(address, channels),
        lambda address: DecodeClient(address, channels),
        lease_ttl_s=config.lease_ttl_s,
        max_waiting=config.limits.max_waiting,
    )
    app = build_app(_backend(config, tokenizer, fleet), api_keys, config.limits.max_body_bytes, config.deadlines.body_s)
    http = _listen(config.listen.host, config.listen.port)
    # Nodes are told where the router is; the name matters only for what we print.
    control = RpcServer(config.control.host, config.control.port, advertise_host=_printable(config.control.host))
    control.add_registry(fleet)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level=logging.WARNING,
            lifespan="off",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(config.shutdown_grace_s),
        )
    )
    _stop_on_signals(server)
    try:
        control_address = await control.start()
        host, port = http.getsockname()[:2]
        print(f"router: http http://{host}:{port} control {control_address}", flush=True)
        static = [(Role.PREFILL, address) for address in config.nodes.prefill]
        static += [(Role.DECODE, address) for address in config.nodes.decode]
        async with asyncio.TaskGroup() as tasks:
            housekeeping = tasks.create_task(fleet.run(tuple(static)))
            await server.serve(sockets=[http])
            housekeeping.cancel()
    finally:
        http.close()
        await control.close()
        await channels.close()


def _backend(config: RouterConfig, tokenizer: Tokenizer, fleet: Fleet) -> Backend:
    metrics = Metrics(config.model_name, fleet)
    limits = config.limits
    times = config.deadlines
    deadlines = Deadlines(times.queue_s, times.prefill_s, times.transfer_s, times.token_s, times.total_s)
    return Backend(
        config.model_name,
        tokenizer,
        Dispatcher(fleet, metrics, deadlines, limits.max_inflight),
        metrics,
        PromptLimits(limits.max_prompt_tokens, limits.max_sequences, limits.default_chat_tokens),
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"listen: cannot bind {host}:{port}: {error.strerror or error}") from error


def _printable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def _stop_on_signals(server: uvicorn.Server) -> None:
    def stop() -> None:
        server.should_exit = True

    if sys.platform != "win32":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
