"""The leader of the router's workers: it listens, starts them, starts them again when they die, and knows the nodes.

Nodes register with the leader. It passes every report on, so that each worker has a fleet of its own. A worker tells
the leader what it books, and the leader tells the other workers. The leader keeps the journal of all. It holds the port
and takes no connection. Each worker listens there on a socket of its own (SO_REUSEPORT): the system gives connections
to all of them in equal shares, and none to a worker that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from prometheus_client.multiprocess import mark_process_dead

from hackkv.errors import ConfigError, HackkvError, NodeLost, Unavailable
from hackkv.nodes import NodeInfo
from node.folders import WorkingFolder
from node.pauses import Pauses
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.front import beside
from router.watch.journal import Journal, UnderWay
from router.watch.metrics import SHARED
from router.workers.link import WorkerLink
from transport.closing import reap
from transport.convert import NODE_INFO

log = logging.getLogger(__name__)

START_S: Final = 120.0
"""Time that a worker gets until it is ready."""
STOP_S: Final = 10.0
"""Time beyond `shutdown_grace_s` that workers get to stop by themselves."""
ASK_S: Final = 2.0
"""Seconds that the page waits for a worker."""


@dataclass(eq=False, slots=True)
class RouterWorker:
    """A worker: its process, and the link to it."""

    name: str
    process: Process
    link: WorkerLink
    under_way: UnderWay = field(default_factory=UnderWay)
    failure: HackkvError | None = None
    """Why the worker could not start, as it reports."""

    async def kill(self) -> int:
        """End it, if it still runs; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


class Leader:
    """Serves HTTP by `config.workers` processes."""

    def __init__(self, config: RouterConfig, fleet: Fleet, journal: Journal) -> None:
        self.journal = journal
        self._config, self._fleet = config, fleet
        self._folder = WorkingFolder()
        """Holds the workers' series of `/metrics`."""
        self._workers: dict[str, RouterWorker] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._hearing = set[asyncio.Task[None]]()
        fleet.nodes.followers.append(self._pass_on)

    async def open(self, http: socket.socket) -> None:
        """Start all workers. Raises `ConfigError` or `NodeLost` if one of them cannot start."""
        names = [str(number) for number in range(self._config.workers)]
        starting = [asyncio.create_task(self._start(name, http)) for name in names]
        try:
            workers = await asyncio.gather(*starting)
        finally:
            await reap(*starting)
        self._keepers = [asyncio.create_task(self._keep(worker, http)) for worker in workers]

    async def serve(self, http: socket.socket, stop: asyncio.Event) -> None:
        """Start workers that die again until `stop`, then let them end. Those that do not end in time are killed."""
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        await reap(stopped, *self._keepers)
        for task in done:
            task.result()  # a keeper ends by a fault of ours only
        for worker in self._workers.values():
            worker.link.tell("stop")
        ends = [worker.process.wait() for worker in self._workers.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown_grace_s + STOP_S):
                await asyncio.gather(*ends)

    async def close(self) -> None:
        """End every worker that still runs."""
        if self._keepers:
            await reap(*self._keepers)
        for worker in self._workers.values():
            worker.link.close()
            await worker.kill()
        self._folder.close()

    # Workers --------------------------------------------------------------------------------------------------------

    async def _start(self, name: str, http: socket.socket) -> RouterWorker:
        """Start a worker and wait until it serves. Raises the error that the worker reports, or `NodeLost`."""
        ours, theirs = socket.socketpair()
        with theirs, beside(http) as listener:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "router.workers.process", str(listener.fileno())),
                stdin=theirs.fileno(),
                stdout=DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, SHARED: str(self._folder.path)},
            )
        worker = self._workers[name] = RouterWorker(name, process, await WorkerLink.over(ours))
        worker.link.tell("config", [name, self._config.model_dump(mode="json")])
        for member in self._fleet.nodes.members():
            worker.link.tell("node", data=NODE_INFO.encode(member.info))
        hearing = asyncio.create_task(self._hear(worker))
        hearing.add_done_callback(self._hearing.discard)
        self._hearing.add(hearing)
        try:
            await worker.link.ask("ready", None, START_S)
        except Unavailable as error:
            code = await worker.kill()
            raise worker.failure or NodeLost(f"worker {name} of the router ended with code {code}: {error}") from error
        return worker

    async def _keep(self, worker: RouterWorker, http: socket.socket) -> None:
        """Start a worker again whenever it ends."""
        pauses, began = Pauses(), monotonic()
        while True:
            code = await worker.process.wait()
            self._forget(worker)
            why, ended = f"worker {worker.name} ended with code {code}", worker
            while worker is ended:
                pause = pauses.after(monotonic() - began)
                log.error("%s; it is started again in %g s", why, pause)
                await asyncio.sleep(pause)
                began = monotonic()
                try:
                    worker = await self._start(worker.name, http)
                except HackkvError as error:
                    why = str(error)
            log.warning("worker %s serves again", worker.name)

    def _forget(self, worker: RouterWorker) -> None:
        """Drop a worker that has ended. Its requests are gone with it."""
        worker.link.close()
        worker.under_way = UnderWay()
        self._add_up()
        self._fleet.sharing.lost(worker.name)
        self._tell_others(worker, "lost", worker.name)
        mark_process_dead(worker.process.pid, str(self._folder.path))  # type: ignore[no-untyped-call]

    # What they say --------------------------------------------------------------------------------------------------

    async def _hear(self, worker: RouterWorker) -> None:
        """Take what a worker says until it is gone."""

        async def hear(subject: str, value: Any, _: bytes) -> None:
            match subject:
                case "report":
                    self._fleet.sharing.take(worker.name, value)
                    self._tell_others(worker, "report", [worker.name, value])
                case "under way":
                    worker.under_way = UnderWay(*value)
                    self._add_up()
                case "ended":
                    self.journal.take(value[0], prefilled=value[1])
                case "failed":
                    worker.failure = (ConfigError if value[1] else HackkvError)(value[0])

        async def answer(subject: str, after: int) -> Any:
            return await (self._requests(after) if subject == "requests" else self.journal.cluster(after))

        try:
            await worker.link.run(hear, answer)
        except Exception:  # its link is closed, so it ends, and is started again
            log.exception("worker %s said what cannot be understood", worker.name)

    async def _requests(self, after: int) -> dict[str, Any]:
        """The journal's requests, with those on their way in all workers. A worker that does not answer has none."""
        told = await self.journal.requests(after)
        asked = (worker.link.ask("live", None, ASK_S) for worker in self._workers.values())
        for live in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(live, list):
                told["live"] += live
        return told

    def _add_up(self) -> None:
        self.journal.elsewhere = sum((worker.under_way for worker in self._workers.values()), UnderWay())

    def _tell_others(self, than: RouterWorker, subject: str, value: Any) -> None:
        for worker in self._workers.values():
            if worker is not than:
                worker.link.tell(subject, value)

    def _pass_on(self, info: NodeInfo) -> None:
        data = NODE_INFO.encode(info)
        for worker in self._workers.values():
            worker.link.tell("node", data=data)
