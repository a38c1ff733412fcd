"""The router: the registry's gRPC server, the fleet's housekeeping, and HTTP, in this process or in its workers."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from node.announcement import announce
from node.listening import bind
from router.config import RouterConfig
from router.fleet.membership import Membership
from router.front import Front, allow_many_sockets, make_fleet, url_of
from router.scopes import unwrapped
from router.watch.journal import Journal
from router.workers.leader import Leader
from transport.channels import ChannelPool
from transport.rpc_server import RpcServer
from transport.trust import Trust, load_trust


class HttpServing(Protocol):
    """Whoever serves HTTP: this process (`Front`), or others that it leads (`Leader`)."""

    journal: Journal

    async def open(self, http: socket.socket) -> None:
        """Get ready. Raises `ConfigError` or `HackkvError` if that fails."""
        ...

    async def serve(self, http: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop` is set and what is in flight has had its time."""
        ...

    async def close(self) -> None:
        """End whatever was started."""
        ...


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises `ConfigError` if something is wrong with the files or a port is taken."""
    allow_many_sockets()
    trust = load_trust(config.internal, config.control.host)
    channels = ChannelPool(trust=trust)
    fleet = make_fleet(config, channels)
    journal = Journal(fleet, trace_link=config.trace_link)
    serving: HttpServing = Leader(config, fleet, journal) if config.workers > 1 else Front(config, fleet, journal)
    control = _registry(config, fleet.nodes, trust)
    http = bind(config.listen.host, config.listen.port)
    try:
        control_address = await control.start()
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                housekeeping = [
                    tasks.create_task(fleet.nodes.run(config.static_nodes)),
                    tasks.create_task(journal.run()),
                ]
                await serving.open(http)
                announce(http=url_of(http, config.listen.advertise_host), control=control_address)
                await serving.serve(http, stop)
                for task in housekeeping:
                    task.cancel()
    finally:
        http.close()
        await serving.close()
        await control.close()
        await channels.close()


def _registry(config: RouterConfig, nodes: Membership, trust: Trust) -> RpcServer:
    """The port at which nodes register."""
    listen = config.control
    control = RpcServer(listen.host, listen.port, advertise_host=listen.advertise_host, trust=trust)
    control.add_registry(nodes)
    return control
