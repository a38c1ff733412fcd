"""The life of a node process, whatever its role: load, open one port, register, serve, drain, close.

A role gives a function that makes its service from a `Ground`; see `prefill_node/__main__.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar
from uuid import uuid4

import torch

from hackkv.canary import check_codec
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.device import AUTO, memory_of
from hackkv.model.warm import warm_up
from hackkv.model.worker import Worker, load_worker
from hackkv.nodes import NodeIdentity
from hackkv.types import Role
from node.announcement import announce, say
from node.config import NodeConfig
from node.process import Shutdown
from node.spans import ProcessTracer, open_spans
from transport.base import DecodeNode, PrefillNode
from transport.membership import stay_member
from transport.rpc_server import RpcServer
from transport.trust import load_trust
from transport.wires import Site, check_machine, check_wires

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker that was loaded and checked before the node's process was forked, and its settings."""

    model: ModelConfig
    codec: CodecConfig
    worker: Worker

    def serves(self, config: NodeConfig) -> bool:
        """Whether a node with these settings may use the worker. The number of threads can still be changed."""
        model = self.model.model_copy(update={"threads": config.model.threads})
        return (model, self.codec) == (config.model, config.codec)


@dataclass(frozen=True, slots=True)
class Ground(Generic[ConfigT]):
    """The arguments of a role's service, ready before the service is made: a loaded model, an open port, settings."""

    config: ConfigT
    worker: Worker
    num_pages: int
    """The number of pages, of all layers and KV heads, that fit into `kv_bytes`."""
    identity: NodeIdentity
    site: Site
    spans: ProcessTracer

    @property
    def server(self) -> RpcServer:
        """The server on the node's port."""
        return self.site.server


class Service(Protocol):
    """The methods of a service that its process needs, in addition to the protocol for callers."""

    @property
    def draining(self) -> asyncio.Event:
        """Set when the node accepts nothing new, and never cleared."""
        ...

    async def drain(self, within_s: float) -> None:
        """Accept nothing new and finish the present requests. Those left after `within_s` seconds are given up."""
        ...


@dataclass(frozen=True, slots=True)
class Hosted:
    """A node that serves."""

    service: Service
    face: PrefillNode | DecodeNode
    """The service as callers reach it: itself, or wrapped for faults and tracing."""


OpenNode = Callable[[Ground[ConfigT]], AbstractAsyncContextManager[Hosted]]
"""Makes a role's service and adds it to the server. At the end it closes both, in the order that their calls need."""


async def serve_node(
    role: Role, open_node: OpenNode[ConfigT], config: ConfigT, shutdown: Shutdown, loaded: Loaded | None = None
) -> None:
    """Run one node until it is told to end. Raises `ConfigError` or `CheckpointError` before a port is open."""
    check_wires(config.wire)
    trust = load_trust(config.internal, config.listen.host)
    check_machine(config.wire, config.listen.host, config.internal)
    worker = await worker_for(config, loaded)
    if worker.model.device.type == "cuda":
        torch.cuda.set_device(worker.model.device)  # for this thread: its wires ask for the current device
    num_pages = worker.pages_in(_kv_bytes(config, worker), prompts=role is Role.PREFILL)
    if compiler := worker.backend.compiler:
        say(f"compiling the kernels of {worker.kernels}, as far as this machine's cache lacks them")
        await asyncio.to_thread(warm_up, worker, compiler, config.busiest(worker.model.device.type).slots, say)
        say("the kernels are compiled and have run")
    listen = config.listen
    async with RpcServer(listen.host, listen.port, advertise_host=listen.advertise_host, trust=trust) as server:
        address = await server.start()
        identity = NodeIdentity(config.node_id or f"{role}@{address}", address, uuid4().hex)
        site = Site(server, trust, xxh3_64=worker.backend.xxh3_64)
        spans = open_spans(config.traces, role, identity.node_id)
        try:
            async with open_node(Ground(config, worker, num_pages, identity, site, spans)) as node:
                announce(node=identity.node_id, address=address)
                service, describe = node.service, node.face.describe
                async with shutdown.draining(partial(service.drain, config.drain_s)):
                    await stay_member(config.router, describe, shutdown.stop, trust, news=service.draining)
        finally:
            await spans.close()


def _kv_bytes(config: NodeConfig, worker: Worker) -> int:
    if config.kv_bytes != AUTO:
        return config.kv_bytes
    device = worker.model.device
    return worker.auto_kv_bytes(config.busiest(device.type), config.nodes_on_device, memory_of(device))


async def worker_for(config: NodeConfig, loaded: Loaded | None) -> Worker:
    """The worker in `loaded` if it has these settings, whatever its number of threads; else a new one."""
    if loaded and loaded.serves(config):
        loaded.worker.backend.use_threads(config.model.threads or torch.get_num_threads())
        return loaded.worker
    # In a thread: the check may take a minute, and signals must be handled meanwhile. A codec is refused before its
    # model takes memory.
    loss = await asyncio.to_thread(check_codec, config.model, config.codec)
    return replace(load_worker(config.model, config.codec), loss=loss)
