"""The router as a process over scripted nodes behind real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hackkv.types import Role
from tests.router.scripted import Script, ScriptedDecode, ScriptedPrefill, info
from transport.channels import ChannelPool
from transport.rpc_client import RegistryClient
from transport.rpc_server import RpcServer

PATIENCE_S = 60.0
WORKERS = pytest.mark.parametrize("workers", [1, 2])
"""For tests of the router as processes: what one process keeps, several keep together."""
ROUTERS = pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
"""The same for more tests: `make test` runs them with one process, `make test-all` with two as well."""


@asynccontextmanager
async def router(checkpoint: Path, *settings: str) -> AsyncIterator[tuple[Process, dict[str, str]]]:
    """A running router and the addresses it announced."""
    base = (f"model={checkpoint}", "listen.port=0", "control.port=0", "served_model_name=tiny", *settings)
    arguments = [argument for setting in base for argument in ("--set", setting)]
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
    """One prefill and one decode node behind real gRPC servers, registered with the router."""
    script = Script()
    decode = ScriptedDecode("d0", script)
    server, other = RpcServer("127.0.0.1", 0), RpcServer("127.0.0.1", 0)
    other.add_decode(decode)
    decode_address = await other.start()
    prefill = ScriptedPrefill("p0", script, {decode_address: decode})
    server.add_prefill(prefill)
    prefill_address = await server.start()
    channels = ChannelPool()
    try:
        registry = RegistryClient(control, channels)
        await registry.register(info(Role.PREFILL, "p0", address=prefill_address))
        await registry.register(info(Role.DECODE, "d0", address=decode_address))
        yield prefill, decode
    finally:
        await server.close()
        await other.close()
        await channels.close()
