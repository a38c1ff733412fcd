"""A whole cluster on one machine: router, prefill and decode nodes as processes, each with a YAML file of its own.

All of them are forked from one process (`app.forkserver`), so that they start fast and share memory. The standard input
of every child is the reading end of a pipe from this process. A child stops when its input ends, so none outlives the
cluster, not even when this process is killed. A node that dies is started again (`watch`). Meanwhile requests wait for
it or go on elsewhere. If the fork server dies, no node is affected, and the next start makes another one.

This module imports neither torch nor pydantic: the processes that it starts are slow enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from app.forking import Forked, ForkServerClient, UnattachedServer, adopting, failure
from hackkv.errors import ConfigError, HackkvError, NodeLost
from node.announcement import read_announcement, read_word
from node.folders import WorkingFolder
from node.listening import bind
from node.pauses import Pauses
from transport.closing import reap

STOP_S = 3.0
"""Time that children get to stop by themselves before they are killed."""
ROUTER_GRACE_S = 1.0
"""The router's share of `STOP_S`. Nodes stop at the same moment, so requests in flight have nothing to wait for."""
POLL_S = 0.02
START_S = 120.0
"""The longest silence of processes that are not ready yet, and of the check of a model."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes to start. `worker` holds the settings that all nodes share (model, codec, kv_bytes, ...), `prefill`
    and `decode` those of one role.

    `router` needs no `model`: it gets the model of the nodes.
    """

    router: dict[str, Any]
    worker: dict[str, Any]
    num_prefill: int = 2
    num_decode: int = 2
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)

    def settings_of(self, role: str) -> dict[str, Any]:
        """The settings of a node. A section `model` of its role adds to that of `worker`."""
        own = self.prefill if role == "prefill" else self.decode
        return {**self.worker, **own, "model": {**self.worker.get("model", {}), **own.get("model", {})}}


@dataclass(frozen=True, slots=True)
class Checked:
    """The model that is served, after its check (`app.check`)."""

    folder: str
    name: str
    """The name of the model."""
    loss: dict[str, Any] | None
    """A `CodecLoss`; None for a lossless codec."""
    devices: tuple[str, ...] = ()
    """The devices on which nodes compute; they take turns."""

    def placed(self, node: int, nodes: int) -> tuple[str, int]:
        """The device of node number `node` of `nodes`, and how many of these nodes share it."""
        index = node % len(self.devices)
        return self.devices[index], len(range(index, nodes, len(self.devices)))


@dataclass(eq=False, slots=True)
class NodeProcess:
    """One child process."""

    name: str
    role: str
    process: Forked
    arguments: tuple[str, ...] = ()
    ready: dict[str, str] = field(default_factory=dict)


class LocalCluster:
    """The running processes; made by `running`."""

    def __init__(self, plan: ClusterPlan, folder: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self.token_file = folder / "token"
        """Holds the token that callers of internal ports must show."""
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(32), encoding="ascii")
        self.children: list[NodeProcess] = []
        """The router comes first."""
        self.model = Checked("", "", None)
        """Known once the cluster has started."""
        self._server: ForkServerClient | None = None
        self._renewing = asyncio.Lock()

    @property
    def url(self) -> str:
        """Address of the router's HTTP API."""
        return self.children[0].ready["http"]

    async def start(self, timeout_s: float, begun: UnattachedServer | None = None) -> None:
        """Start everything and wait until the router counts every node. Raises `ConfigError` or `NodeLost`.

        No node opens a port before the model has passed its check.
        """
        plan = self._plan
        self._server = ForkServerClient.of(begun) if begun else await ForkServerClient.start()
        _refuse_taken(plan.router.get("listen", {}))
        router = await self._fork("router", "router")
        if plan.num_prefill + plan.num_decode:
            self.model = await self._check(timeout_s)
        given = {"model": self.model.folder, "shutdown_grace_s": ROUTER_GRACE_S, **plan.router}
        given["served_model_name"] = given.get("served_model_name") or self.model.name
        self._instruct(router, given)
        await self._begin(timeout_s, router)
        roles = [("prefill", plan.num_prefill), ("decode", plan.num_decode)]
        nodes = [(role, index) for role, count in roles for index in range(count)]
        children = [(await self._fork(role, f"{role}-{index}"), plan.settings_of(role)) for role, index in nodes]
        joined = {"router": router.ready["control"]}
        for number, (child, own) in enumerate(children):
            self._instruct(child, {**self._placed(number, own), **joined, "node_id": child.name})
        await self._begin(timeout_s, *(child for child, _ in children))
        await self._until_registered(monotonic() + timeout_s)

    async def watch(self) -> int:
        """Start nodes that die again, until the router ends; return its exit code."""
        router, *nodes = self.children
        keepers = [asyncio.create_task(self._keep(node)) for node in nodes]
        try:
            return await router.process.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)

    async def restart(self, name: str) -> None:
        """Start a node whose process has ended. Raises `ConfigError` or `NodeLost`."""
        child = next(child for child in self.children if child.name == name)
        child.process = await (await self._forks()).fork(child.role, child.name, self.model.loss)
        await self._begin(START_S, child)

    async def _keep(self, node: NodeProcess) -> None:
        pauses = Pauses()
        while True:
            began = monotonic()
            code = await node.process.wait()
            pause = pauses.after(monotonic() - began)
            self._progress(f"{node.name} ended with exit code {code}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            try:
                await self.restart(node.name)
            except HackkvError as error:
                self._progress(str(error))

    async def stop(self) -> None:
        """Stop every process: first by closing its standard input, then, after `STOP_S`, by force."""
        for child in reversed(self.children):  # nodes first: they need not miss the router
            child.process.close_stdin()
        if self._server is not None:
            await self._server.close()
        ends = [child.process.wait() for child in self.children]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*ends)
        for child in self.children:
            await child.process.end()

    def _placed(self, node: int, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with the folder of the model, a node's device and the number of nodes on it. The node need not
        search for them."""
        device, nodes = self.model.placed(node, self._plan.num_prefill + self._plan.num_decode)
        model = {**settings["model"], "path": self.model.folder, "device": device}
        return {**settings, "model": model, "nodes_on_device": nodes}

    async def _check(self, patience_s: float) -> Checked:
        """Find and check the model, while the fork server loads it. Raises `ConfigError` or `NodeLost`. A silence of
        `patience_s` also raises `NodeLost`: the check reports each codec to which it comes."""
        server = await self._forks()
        process = await server.fork("check", "check")
        try:
            async with asyncio.timeout(patience_s) as patience:
                worker = self._plan.worker
                settings = {key: value for key, value in worker.items() if key in ("model", "codec")}
                process.order([self._write("check", settings)])
                heard = partial(self._heard, process, lambda: patience.reschedule(_now() + patience_s))
                found = (await heard("found"))["found"]
                self.model = Checked(found["folder"], found["name"], None, tuple(found["devices"]))
                loading = asyncio.create_task(self._load(server))
                try:
                    passed = (await heard("passed"))["passed"]
                    await loading
                finally:
                    await reap(loading)
        except TimeoutError as error:
            raise NodeLost("the model was not checked in time") from error
        finally:
            await process.end()
        return replace(self.model, loss=passed)

    async def _heard(self, process: Forked, on_word: Callable[[], None], wanted: str) -> dict[str, Any]:
        """The next message of `app.check` with key `wanted`; each message calls `on_word`. Raises a reported error."""
        while line := await process.stdout.readline():
            on_word()
            message: dict[str, Any] = json.loads(line)
            if "failed" in message:
                raise failure(message)
            if wanted in message:
                return message
            self._progress(message["say"])
        raise NodeLost(f"the check of the model ended with exit code {await process.wait()}; its message is above")

    async def _forks(self) -> ForkServerClient:
        """The fork server; if it has died, a new one with the model loaded."""
        async with self._renewing:
            if self._server is None or not self._server.alive:
                self._server = await ForkServerClient.start()
                if self.model.folder:
                    await self._load(self._server)
            return self._server

    async def _load(self, server: ForkServerClient) -> None:
        """Let the fork server load the model that its forks share."""
        settings = self._placed(0, self._plan.settings_of("prefill"))
        await server.load(settings["model"], settings.get("codec", {}))

    async def _fork(self, role: str, name: str) -> NodeProcess:
        process = await (await self._forks()).fork(role, name, self.model.loss)
        child = NodeProcess(name, role, process)
        self.children.append(child)
        return child

    def _instruct(self, child: NodeProcess, settings: dict[str, Any]) -> None:
        """Give a child its settings."""
        common = {"log_level": "warning", "internal": {"token_file": str(self.token_file)}}
        child.arguments = ("--config", self._write(child.name, {**common, **settings}), "--supervised")

    async def _begin(self, patience_s: float, *children: NodeProcess) -> None:
        """Let children begin, and wait until all are ready. Raises `ConfigError` or `NodeLost`.

        Each word of one renews the patience with all: they wait for each other when they compile the same kernels.
        """
        waiting = {child.name: child for child in children}

        async def begin(child: NodeProcess) -> None:
            child.process.order(child.arguments)
            child.ready = await _announcement(child, heard)
            del waiting[child.name]
            heard(f"{child.name} ready at {child.ready.get('http', child.ready.get('address', '?'))}")

        def heard(word: str) -> None:
            patience.reschedule(_now() + patience_s)
            self._progress(word)

        beginning = [asyncio.create_task(begin(child)) for child in children]
        try:
            async with asyncio.timeout(patience_s) as patience:
                await asyncio.gather(*beginning)
        except TimeoutError as error:
            for child in waiting.values():
                child.process.kill()
            raise NodeLost(f"{', '.join(waiting)} not ready in time") from error
        finally:
            await reap(*beginning)

    def _write(self, name: str, settings: dict[str, Any]) -> str:
        """Write a configuration file, whose YAML is JSON; return its path."""
        path = self._folder / f"{name}.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return str(path)

    async def _until_registered(self, deadline: float) -> None:
        wanted = {"prefill": self._plan.num_prefill, "decode": self._plan.num_decode}
        while monotonic() < deadline:
            nodes = await asyncio.to_thread(_counted, self.url, deadline - monotonic())
            if nodes == wanted:
                return
            await asyncio.sleep(POLL_S)
        raise NodeLost(f"the router counts {nodes} nodes, not {wanted}")


def _refuse_taken(listen: dict[str, Any]) -> None:
    """Raise `ConfigError` now if the router could not listen there. It binds its port long after this, when the model
    has passed its check."""
    match listen:
        case {"host": str(host), "port": int(port)} if port:  # 0 takes any free one
            bind(host, port).close()


async def _announcement(child: NodeProcess, heard: Callable[[str], None]) -> dict[str, str]:
    """Read a child's output up to its ready line; `heard` gets what it says before. Raises `ConfigError` or `NodeLost`
    if the child ends before that."""
    while line := (await child.process.stdout.readline()).decode("utf-8", "replace"):
        if ready := read_announcement(line):
            return ready
        if word := read_word(line):
            heard(f"{child.name}: {word}")
    code = await child.process.wait()
    failure = ConfigError if code == 2 else NodeLost
    raise failure(f"{child.name} ended with exit code {code} before it was ready; its message is above")


def _now() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()


def _counted(url: str, timeout_s: float) -> dict[str, int]:
    """How many nodes of each role the router counts. Raises `NodeLost`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        nodes: dict[str, int] = json.load(connection.getresponse())["nodes"]
    except (OSError, http.client.HTTPException) as error:
        raise NodeLost(f"the router was ready but does not answer: {error}") from error
    finally:
        connection.close()
    return nodes


@contextlib.asynccontextmanager
async def running(
    plan: ClusterPlan, progress: Callable[[str], None], begun: UnattachedServer | None = None
) -> AsyncIterator[LocalCluster]:
    """Start a cluster, on the fork server `begun` if there is one. At the end stop every process, whatever happened."""
    with contextlib.closing(WorkingFolder()) as folder, adopting():
        cluster = LocalCluster(plan, folder.path, progress)
        try:
            await cluster.start(START_S, begun)
            yield cluster
        finally:
            await asyncio.shield(cluster.stop())
