"""The processes that are measured: a router, its two scripted nodes, and a server without a router."""

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
    """A router over scripted nodes, and a server without any."""

    url: str
    plain: str
    router: Process
    nodes: Mapping[Role, Process]
    """By role."""

    def processes(self) -> list[psutil.Process]:
        """Those of the router that serve HTTP: its own, or its leader and the workers."""
        router = psutil.Process(self.router.pid)
        return [router, *(child for child in router.children() if WORKER in child.cmdline())]

    def memory_mib(self) -> float:
        """Resident memory of these processes."""
        return sum(float(one.memory_info().rss) for one in self.processes()) / 2**20

    def processor_s(self) -> dict[str, float]:
        """Processor time of every process that the router's clients wait for, and their own."""
        routers = {f"router {index}" if index else "router": one for index, one in enumerate(self.processes())}
        nodes = {f"{role} node": psutil.Process(node.pid) for role, node in self.nodes.items()}
        times = {name: one.cpu_times() for name, one in {**routers, **nodes, "clients": psutil.Process()}.items()}
        return {name: float(one.user + one.system) for name, one in times.items()}


def since(before: dict[str, float], after: dict[str, float], per: float) -> dict[str, float]:
    """What every process has used in between, divided by `per`."""
    return {name: (seconds - before[name]) / per for name, seconds in after.items()}


def listed(shares: dict[str, float], form: str) -> str:
    """Shares of processes as words."""
    return ", ".join(f"{name} {format(share, form)}" for name, share in shares.items())


@contextlib.asynccontextmanager
async def running(model: Path, workers: int, turns: Path | None = None) -> AsyncIterator[Cluster]:
    """Start the router, its nodes and the plain server; all end on exit. With a folder `turns`, the longest turns of
    the first three lie there then, a file for each (`bench.router.turns`)."""
    settings = (
        f"model={model}", "listen.port=0", "control.port=0", "served_model_name=bench", f"workers={workers}",
        "lease_ttl_s=60",  # the nodes share the cores, and are not what is measured
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
        # The end for reading first: it is dropped here when its node has it.
        nodes = {}
        for role, end in zip((Role.DECODE, Role.PREFILL), os.pipe(), strict=True):
            with os.fdopen(end, "rb" if role is Role.DECODE else "wb"):
                words = ("bench.router.nodes", role, "--control", address["control"], "--kv", str(end))
                nodes[role], _ = await start(*timed(f"{role} node"), *words, given=end)
        _, plain = await start("bench.router.plain")
        yield Cluster(address["http"], plain["http"], router, nodes)


async def _start(command: Sequence[str], given: Sequence[int]) -> tuple[Process, dict[str, str]]:
    """Start a module. It inherits the file descriptors that it is `given`."""
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
