"""The router as a process over scripted nodes behind real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from hackkv.nodes import WireAddress
from tests.router.scripted import Cluster, ScriptedDecode, ScriptedPrefill
from transport.channels import ChannelPool
from transport.rpc_client import RegistryClient
from transport.rpc_server import RpcServer

PATIENCE_S = 240.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of `http` only. Otherwise httpx would read the machine's certificates for each client, which takes
40 ms."""
UNHURRIED = dict.fromkeys(("transfer_s", "landed_s", "token_s"), 3600.0)
"""Deadlines of a router that are longer than any test: requests leave a node for other reasons."""
WORKERS = pytest.mark.parametrize("workers", [1, 2])
"""For tests of the router as one process and as several: both must keep the same rules."""
ROUTERS = pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
"""Like `WORKERS`, but only `make test-all` runs these tests with two processes."""


@asynccontextmanager
async def router(checkpoint: Path, *settings: str) -> AsyncIterator[tuple[Process, dict[str, str]]]:
    """A running router and the addresses that it announced."""
    base = (f"model={checkpoint}", "listen.port=0", "control.port=0", "served_model_name=tiny")
    deadlines = (f"deadlines.{name}={seconds}" for name, seconds in UNHURRIED.items())
    arguments = [argument for setting in (*base, *deadlines, *settings) for argument in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *arguments, stdout=PIPE)
    try:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())["ready"]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)


@asynccontextmanager
async def nodes(control: str) -> AsyncIterator[tuple[ScriptedPrefill, ScriptedDecode]]:
    """One prefill and one decode node that have joined the router at `control`."""
    cluster = Cluster(prefill=1, decode=1)
    async with joined(cluster, control):
        yield cluster.prefill["p0"], cluster.decode["d0"]


@asynccontextmanager
async def joined(cluster: Cluster, control: str) -> AsyncIterator[None]:
    """Register the nodes of a cluster, behind real gRPC servers, with the router at `control` as new processes."""
    incarnation = uuid4().hex
    async with AsyncExitStack() as stack:
        channels = ChannelPool()
        stack.push_async_callback(channels.close)
        registry = RegistryClient(control, channels)
        for node in cluster.nodes:
            server = RpcServer("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            if isinstance(node, ScriptedPrefill):
                server.add_prefill(node)
            else:
                server.add_decode(node)
            where = {"address": await server.start(), "incarnation": incarnation}
            # Scripted nodes know each other by their names.
            wires = (WireAddress("inproc", node.node_id),)
            await registry.register(cluster.info(node.node_id, **where, wires=wires))
        yield


def series(page: str) -> dict[str, float]:
    """The series of a page of `/metrics`: 'name{labels}' -> value."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
