"""A whole cluster on one machine: router, prefill and decode nodes as processes, each with a YAML file of its own.

The standard input of every child is the reading end of a pipe from this process. A child stops when its input ends, so
none outlives the cluster, not even when this process is killed. A node that dies is started again (`watch`); meanwhile
requests wait for it or go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import httpx
import yaml

from hackkv.errors import ConfigError, HackkvError, NodeLost
from node.process import read_announcement

STOP_S = 3.0
"""Time that children get to stop by themselves before they are killed."""
ROUTER_GRACE_S = 1.0
"""The nodes stop at the same moment as the router, so requests in flight have nothing to wait for."""
POLL_S = 0.1
START_S = 120.0
"""Time that a process gets until it is ready."""
RESTART_S, LONGEST_RESTART_S = 1.0, 30.0
"""First and longest pause before a node is started again. It doubles each time the node lived for less than the
longest pause."""

ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR", **os.environ}
"""For every role. gRPC's own messages about broken connections would only repeat ours."""
_SHARED_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", **ENVIRONMENT}
"""Compute threads that wait must not spin, since processes share the cores."""

ENTRIES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}
"""Role -> module that `python -m` runs."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start. `worker` holds settings that prefill and decode nodes share (model, codec, kv_bytes, ...)."""

    router: dict[str, Any]
    worker: dict[str, Any]
    num_prefill: int = 2
    num_decode: int = 2
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Child:
    """One child process."""

    name: str
    command: tuple[str, ...]
    process: Process
    ready: dict[str, str] = field(default_factory=dict)


class LocalCluster:
    """The running processes; made by `running`."""

    def __init__(self, plan: ClusterPlan, folder: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self.token_file = folder / "token"
        """Holds the token that the internal ports ask callers for."""
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(32), encoding="ascii")
        self.children: list[Child] = []

    @property
    def url(self) -> str:
        """Address of the router's HTTP API."""
        return self.children[0].ready["http"]

    async def start(self, timeout_s: float) -> None:
        """Start everything and wait until the router counts every node. Raises `ConfigError` or `NodeLost`."""
        deadline = monotonic() + timeout_s
        settings = {"shutdown_grace_s": ROUTER_GRACE_S, **self._plan.router}
        router = await self._spawn("router", "router", settings, deadline)
        control = router.ready["control"]
        nodes = [("prefill", i, self._plan.prefill) for i in range(self._plan.num_prefill)]
        nodes += [("decode", i, self._plan.decode) for i in range(self._plan.num_decode)]
        starting = []
        for role, index, settings in nodes:
            name = f"{role}-{index}"
            merged = {**self._plan.worker, **settings, "router": control, "node_id": name}
            starting.append(self._spawn(name, role, merged, deadline))
        await asyncio.gather(*starting)
        await self._until_registered(deadline)

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
        await self._launch(child, monotonic() + START_S)

    async def _keep(self, node: Child) -> None:
        pause = RESTART_S
        while True:
            began = monotonic()
            code = await node.process.wait()
            if monotonic() - began > LONGEST_RESTART_S:
                pause = RESTART_S
            self._progress(f"{node.name} ended with exit code {code}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RESTART_S)
            try:
                await self._launch(node, monotonic() + START_S)
            except HackkvError as error:
                self._progress(str(error))

    async def stop(self) -> None:
        """Stop every process: first by closing its standard input, after `STOP_S` by force."""
        for child in self.children:
            if child.process.stdin:
                child.process.stdin.close()
        ends = [child.process.wait() for child in self.children]
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*ends)
        except TimeoutError:
            for child in self.children:
                if child.process.returncode is None:
                    child.process.kill()
                    await child.process.wait()

    async def _spawn(self, name: str, role: str, settings: dict[str, Any], deadline: float) -> Child:
        config = self._folder / f"{name}.yaml"
        common = {"log_level": "warning", "internal": {"token_file": str(self.token_file)}}
        config.write_text(yaml.safe_dump({**common, **settings}), encoding="utf-8")
        command = role_command(role, ("--config", str(config), "--supervised"))
        child = Child(name, command, await self._exec(command))
        self.children.append(child)
        await self._until_ready(child, deadline)
        return child

    async def _launch(self, child: Child, deadline: float) -> None:
        child.process = await self._exec(child.command)
        await self._until_ready(child, deadline)

    async def _exec(self, command: Sequence[str]) -> Process:
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=_SHARED_ENVIRONMENT)

    async def _until_ready(self, child: Child, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - monotonic()):
                child.ready = await _announcement(child)
        except TimeoutError as error:
            child.process.kill()
            raise NodeLost(f"{child.name} was not ready in time") from error
        self._progress(f"{child.name} ready at {child.ready.get('http', child.ready.get('address', '?'))}")

    async def _until_registered(self, deadline: float) -> None:
        wanted = {"prefill": self._plan.num_prefill, "decode": self._plan.num_decode}
        async with httpx.AsyncClient(base_url=self.url) as client:
            while monotonic() < deadline:
                try:
                    answer = (await client.get("/ready")).json()
                except httpx.TransportError as error:
                    raise NodeLost(f"the router was ready but does not answer: {error}") from error
                if answer["nodes"] == wanted:
                    return
                await asyncio.sleep(POLL_S)
        raise NodeLost(f"the router counts {answer['nodes']} nodes, not {wanted}")


async def _announcement(child: Child) -> dict[str, str]:
    """Read a child's output up to its ready line. Raises `ConfigError` or `NodeLost` if the child ends before that."""
    output = child.process.stdout
    assert output is not None
    while line := await output.readline():
        if ready := read_announcement(line.decode("utf-8", "replace")):
            return ready
    code = await child.process.wait()
    failure = ConfigError if code == 2 else NodeLost
    raise failure(f"{child.name} ended with exit code {code} before it was ready; its message is above")


@contextlib.asynccontextmanager
async def running(
    plan: ClusterPlan, progress: Callable[[str], None], timeout_s: float = START_S
) -> AsyncIterator[LocalCluster]:
    """Start a cluster, and stop every process at the end, whatever happened."""
    with TemporaryDirectory(prefix="hackkv-") as folder:
        cluster = LocalCluster(plan, Path(folder), progress)
        try:
            await cluster.start(timeout_s)
            yield cluster
        finally:
            await asyncio.shield(cluster.stop())


def role_command(role: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs one role in this interpreter, whatever lies in the current directory (-P)."""
    return (sys.executable, "-P", "-m", ENTRIES[role], *arguments)
