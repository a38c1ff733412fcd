"""The measured processes: a router, its two scripted nodes, and a server that stands in for the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hackkv.types import Role

WORKER = "router.workers.process"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A router over scripted nodes, and the address of a server without a router."""

    url: str
    plain: str
    router: Process
    nodes: Mapping[Role, Process]
    """Role -> process of the node."""

    def processes(self) -> list[psutil.Process]:
        """The router's processes that serve HTTP: its only one, or its leader and the workers."""
        router = psutil.Process(self.router.pid)
        return [router, *(child for child in router.children() if WORKER in child.cmdline())]

    def memory_mib(self) -> float:
        """Resident memory of the router's processes, in MiB."""
        return sum(float(one.memory_info().rss) for one in self.processes()) / 2**20

    def processor_s(self) -> dict[str, float]:
        """Process -> seconds of processor time, for the router, the nodes and the clients (this process)."""
        routers = {f"router {index}" if index else "router": one for index, one in enumerate(self.processes())}
        nodes = {f"{role} node": psutil.Process(node.pid) for role, node in self.nodes.items()}
        times = {name: one.cpu_times() for name, one in {**routers, **nodes, "clients": psutil.Process()}.items()}
        return {name: float(one.user + one.system) for name, one in times.items()}


def since(before: dict[str, float], after: dict[str, float], per: float) -> dict[str, float]:
    """Process -> processor time between two readings, divided by `per`."""
    return {name: (seconds - before[name]) / per for name, seconds in after.items()}


def listed(shares: dict[str, float], form: str) -> str:
    """Shares of processes as words."""
    return ", ".join(f"{name} {format(share, form)}" for name, share in shares.items())


@contextlib.asynccontextmanager
async def running(model: Path, workers: int, turns: Path | None = None) -> AsyncIterator[Cluster]:
    """Start the router, its nodes and the plain server; all end on exit. With a folder `turns`, router and nodes write
    their longest turns there when they end, one file each (`bench.router.turns`)."""
    settings = (
        f"model={model}", "listen.port=0", "control.port=0", "served_model_name=bench", f"workers={workers}",
        "lease_ttl_s=60",  # the nodes share the cores and are not what is measured, so they must not lose their leases
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:

        def timed(name: str) -> tuple[str, ...]:
            return ("bench.router.turns", str(turns / name)) if turns else ()

        async def start(*command: str, given: int | None = None) -> tuple[Process, dict[str, str]]:
            process, ready = await _start(command, () if given is None else (given,))
            stack.push_async_callback(_end, process)
            return process, ready

        overrides = (word for setting in settings for word in ("--set", setting))
        router, address = await start(*timed("router"), "router", "--supervised", *overrides)
        # The reading end goes first. Each end is closed here once its node has it.
        nodes = {}
        for role, end in zip((Role.DECODE, Role.PREFILL), os.pipe(), strict=True):
            with os.fdopen(end, "rb" if role is Role.DECODE else "wb"):
                words = ("bench.router.nodes", role, "--control", address["control"], "--kv", str(end))
                nodes[role], _ = await start(*timed(f"{role} node"), *words, given=end)
        _, plain = await start("bench.router.plain")
        yield Cluster(address["http"], plain["http"], router, nodes)


async def _start(command: Sequence[str], given: Sequence[int]) -> tuple[Process, dict[str, str]]:
    """Start a module, which inherits the file descriptors `given`. Returns its process and its ready line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdin=PIPE, stdout=PIPE, pass_fds=given
    )
    assert process.stdout is not None
    ready: dict[str, str] = json.loads(await process.stdout.readline())["ready"]
    return process, ready


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
