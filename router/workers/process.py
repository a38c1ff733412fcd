"""A worker of the router: `python -m router.workers.process FD`, started by `router.workers.leader`.

FD is a socket at the router's port; standard input is the link to the leader, which gives the worker
its configuration and tells it of nodes and of what other workers book. A worker whose leader is gone ends at once.
SIGTERM ends it in good order; a terminal's Ctrl-C is for the leader.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from typing import Any, Final

from hackkv.errors import ConfigError, HackkvError, HandshakeRefused
from node.announcement import settle
from node.logs import log_to_stderr
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.front import Front, allow_many_sockets, make_fleet
from router.packets import read_packet
from router.scopes import unwrapped
from router.watch.journal import SAMPLE_S, Journal
from router.workers.link import WorkerLink
from transport.channels import ChannelPool
from transport.convert import NODE_INFO
from transport.trust import load_trust

log = logging.getLogger(__name__)

REPORT_S: Final = 0.01
"""Seconds after which a worker looks again whether it has news of its bookings."""
ASK_S: Final = 5.0
"""Seconds that the page waits for the leader, who asks all workers."""


class LeadersJournal(Journal):
    """The journal of all workers, which the leader keeps. This process knows its own sequences on their way."""

    def __init__(self, fleet: Fleet, link: WorkerLink, trace_link: str) -> None:
        super().__init__(fleet, trace_link=trace_link)
        self._link = link

    def take(self, account: dict[str, Any], *, prefilled: bool) -> None:
        """Tell the leader of a sequence that is over."""
        self._link.tell("ended", [account, prefilled])

    async def cluster(self, after: int) -> dict[str, Any]:
        """The leader's answer. Nodes that have left the fleet of this process count as gone, since leases do not end in
        all processes at once. Raises `Unavailable` if the leader says nothing."""
        told: dict[str, Any] = await self._link.ask("cluster", after, ASK_S)
        self.see_nodes()
        # The leader knows what left before this process began.
        told["gone"] = self.gone() + [one for one in told["gone"] if not self.has_seen(one["id"])]
        return told

    async def requests(self, after: int) -> dict[str, Any]:
        """The leader's answer. Raises `Unavailable` if there is none."""
        told: dict[str, Any] = await self._link.ask("requests", after, ASK_S)
        return told

    async def run(self) -> None:
        """Tell the leader from time to time what is on its way here, and note which nodes are in the fleet."""
        while True:
            self.see_nodes()
            self._link.tell("under way", [self.under_way.sequences, self.under_way.tokens])
            await asyncio.sleep(SAMPLE_S)


class WorkerProcess:
    """One worker."""

    def __init__(self, link: WorkerLink, fleet: Fleet, front: Front) -> None:
        self._link, self._fleet, self._front = link, fleet, front
        self.stop = asyncio.Event()

    async def run(self, http: socket.socket) -> None:
        """Serve until told to stop, or until the leader is gone."""
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(work)
                    for work in (self._listen(), self._fleet.nodes.run(), self._report(), self._front.journal.run())
                ]
                await self._front.open(http)
                await self._front.serve(http, self.stop)
                for other in others:
                    other.cancel()

    async def _listen(self) -> None:
        await self._link.run(self._hear, self._answer)
        if not self.stop.is_set():
            log.error("the router's leader is gone")
            self._front.grace_s = 0
            self.stop.set()

    async def _report(self) -> None:
        while True:
            if (report := self._fleet.sharing.report()) is not None:
                self._link.tell("report", report)
            await asyncio.sleep(REPORT_S)

    async def _hear(self, subject: str, value: Any, data: bytes) -> None:
        match subject:
            case "node":
                try:
                    await self._fleet.nodes.register(NODE_INFO.decode(data))
                except (
                    HandshakeRefused
                ) as error:  # what it does not fit has left the leader's fleet, and will leave ours
                    log.warning("%s", error)
            case "report":
                self._fleet.sharing.take(*value)
            case "lost":
                self._fleet.sharing.lost(value)
            case "stop":
                self.stop.set()

    async def _answer(self, subject: str, value: Any) -> Any:
        return self._front.journal.live() if subject == "live" else None


async def serve(http: socket.socket, control: socket.socket) -> int:
    """Run a worker to its end; return the exit code."""
    reader, writer = await asyncio.open_connection(sock=control)
    head, _ = await read_packet(reader)
    name, settings = head["value"]
    link, given = WorkerLink(reader, writer), RouterConfig.model_validate(settings)
    config = given.model_copy(update={"limits": given.limits.shared_by(given.workers)})
    log_to_stderr(f"{config.node_id or 'router'}-{name}", config.log_level, config.log_format)
    channels = ChannelPool(trust=load_trust(config.internal, config.control.host))
    fleet = make_fleet(config, channels)
    try:
        front = Front(config, fleet, LeadersJournal(fleet, link, config.trace_link))
    except HackkvError as error:
        link.tell("failed", [str(error), isinstance(error, ConfigError)])
        return 2
    settle()
    worker = WorkerProcess(link, fleet, front)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop.set)
    try:
        await worker.run(http)
    finally:
        link.close()
        await front.close()
        await channels.close()
    return 0


def main() -> int:
    """Run the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_sockets()
    return asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=sys.stdin.fileno())))


if __name__ == "__main__":
    sys.exit(main())
