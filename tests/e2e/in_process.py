"""A whole cluster in one process: the real router over real sockets, real nodes, and any wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_node.config import DecodeSettings
from decode_node.service import DecodeService
from hackkv.config import ListenConfig
from hackkv.model.worker import Worker
from hackkv.nodes import NodeIdentity
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from router.api.parser import ParseJob
from router.api.parsers import Parsers
from router.api.strict import Data
from router.config import RouterConfig
from router.service import serve
from tests.e2e.processes import START_S
from tests.router.processes import NO_TLS, router
from transport.channels import ChannelPool
from transport.inproc_wire import InprocNetwork
from transport.rpc_client import RegistryClient
from transport.rpc_server import RpcServer
from transport.wires import Listeners, Site, open_senders

NUM_PAGES = 512


@contextlib.asynccontextmanager
async def in_process_cluster(
    folder: Path,
    worker: Worker,
    wire: str,
    chunk_pages: int,
    *,
    num_prefill: int = 2,
    num_decode: int = 2,
    decode_nodes: list[DecodeService] | None = None,
    prefill_nodes: list[PrefillService] | None = None,
    workers: int = 1,
    **prefilling: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a router and nodes on this event loop; yield a client of the router's HTTP API. With more than one of
    `workers`, the router consists of that many processes.

    Control calls always go over gRPC; `wire` is the wire of the KV. Nodes register once, with a lease longer than any
    test. The nodes are appended to `decode_nodes` and `prefill_nodes`, for tests that disturb them. `prefilling` are
    settings of prefill nodes.
    """
    async with contextlib.AsyncExitStack() as stack:
        ready = await stack.enter_async_context(
            in_process_router(folder) if workers == 1 else _several(folder, workers)
        )
        channels = ChannelPool()
        stack.push_async_callback(channels.close)
        registry = RegistryClient(ready["control"], channels)
        network = InprocNetwork()
        for i in range(num_decode):
            node = await _decode_node(stack, f"decode-{i}", worker, wire, network)
            await registry.register(await node.describe())
            if decode_nodes is not None:
                decode_nodes.append(node)
        for i in range(num_prefill):
            settings = {"chunk_tokens": chunk_pages * worker.layout.page_tokens, **prefilling}
            prefill = await _prefill_node(stack, f"prefill-{i}", worker, wire, network, settings)
            await registry.register(await prefill.describe())
            if prefill_nodes is not None:
                prefill_nodes.append(prefill)
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=ready["http"], timeout=START_S, verify=NO_TLS))


@contextlib.asynccontextmanager
async def _several(folder: Path, workers: int) -> AsyncIterator[dict[str, str]]:
    """Run a router of several processes; yield its announcement."""
    async with router(folder, "lease_ttl_s=3600", f"workers={workers}") as (_, ready):
        yield ready


@contextlib.asynccontextmanager
async def in_process_router(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Run a router on this event loop; yield its announcement: the addresses `http` and `control`."""
    stop = asyncio.Event()
    announced = _Announcements()
    config = RouterConfig(listen=ListenConfig(), control=ListenConfig(), model=folder, lease_ttl_s=3600.0)
    with contextlib.redirect_stdout(announced), pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.api.prompts.Parsers", _LateParsers)
        serving = asyncio.create_task(serve(config, stop))
        ready = await announced.first(serving)
    try:
        yield ready
    finally:
        stop.set()
        await serving


async def _prefill_node(
    stack: contextlib.AsyncExitStack,
    name: str,
    worker: Worker,
    wire: str,
    network: InprocNetwork,
    settings: dict[str, Any],
) -> PrefillService:
    server = RpcServer("127.0.0.1", 0)
    address = await server.start()
    senders = open_senders([wire], Site(server, network=network, xxh3_64=worker.backend.xxh3_64))
    stack.push_async_callback(senders.close)
    identity = NodeIdentity(name, address, "1", senders.wires)
    limits = PrefillSettings.model_validate({"max_prompts": 32, **settings})
    node = PrefillService(identity, worker, senders, NUM_PAGES, limits)
    server.add_prefill(node)
    stack.push_async_callback(node.close)
    stack.push_async_callback(server.close)
    return node


async def _decode_node(
    stack: contextlib.AsyncExitStack, name: str, worker: Worker, wire: str, network: InprocNetwork
) -> DecodeService:
    server = RpcServer("127.0.0.1", 0)
    address = await server.start()
    listeners = Listeners([wire], Site(server, network=network, xxh3_64=worker.backend.xxh3_64))
    settings = DecodeSettings(max_sequences=32, max_batch=16)
    node = DecodeService(NodeIdentity(name, address, "1"), worker, NUM_PAGES, settings)
    server.add_decode(node)
    await node.listen(listeners)
    stack.push_async_callback(node.close)
    stack.push_async_callback(server.close)
    stack.push_async_callback(listeners.close)
    return node


class _LateParsers(Parsers):
    """Parsers whose process starts with the first large body, not with the router. Its start takes a second of a
    core."""

    async def start(self) -> None:
        """Do nothing: `_do` starts the process."""

    async def _do(self, data: Data, job: ParseJob) -> tuple[dict[str, Any], bytes]:
        await super().start()
        return await super()._do(data, job)


class _Announcements:
    """Standard output of the router, up to its announcement."""

    def __init__(self) -> None:
        self._line: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    def write(self, text: str) -> int:
        """Read the announcement from the output of `print`."""
        if text.strip():
            self._line.set_result(json.loads(text)["ready"])
        return len(text)

    def flush(self) -> None:
        """Do nothing: output is not buffered."""

    async def first(self, router: asyncio.Task[None]) -> dict[str, str]:
        """Wait for the announcement. Raises the router's error if it fails before."""
        router.add_done_callback(self._router_ended)
        return await self._line

    def _router_ended(self, router: asyncio.Task[None]) -> None:
        if not self._line.done():
            self._line.set_exception(router.exception() or RuntimeError("the router ended before it was ready"))
