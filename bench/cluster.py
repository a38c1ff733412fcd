"""A cluster of real processes on a tiny random checkpoint, and functions that observe it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import monotonic

import psutil

from app.cluster import ClusterPlan, LocalCluster, running
from bench.connection import Connection
from hackkv.config import InternalConfig
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.nodes import NodeInfo
from transport.channels import ChannelPool
from transport.rpc_client import DecodeClient, PrefillClient
from transport.trust import load_trust

TINY = Tiny(max_context=4608, head_dim=128)
KV_BYTES = 64 << 20
HOST_BYTES = 64 << 20
"""Host memory is small, so that it fills soon after the start and its use then stays level."""
POLL_S = 0.02

Series = dict[str, float]
"""The page `/metrics`: 'name{labels}' -> value."""


@contextlib.asynccontextmanager
async def tiny_cluster(
    checkpoint: Path, codec: str = "hack", *, num_prefill: int = 2, num_decode: int = 2, max_body_bytes: int = 16 << 20
) -> AsyncIterator[LocalCluster]:
    """Start router and nodes on a random FP32 model, which is written to `checkpoint`. All processes end on exit."""
    model = str(write_tiny(checkpoint, TINY))
    worker = {
        "model": {"path": model, "dtype": "float32", "threads": 1},
        "codec": {"name": codec, "allow_loss": True},
        "kv_bytes": KV_BYTES,
        "host_bytes": HOST_BYTES,
    }
    router = {
        "listen": {"port": 0},
        "control": {"port": 0},
        "model": model,
        "limits": {"max_body_bytes": max_body_bytes},
    }
    async with running(ClusterPlan(router, worker, num_prefill, num_decode), lambda _: None) as cluster:
        yield cluster


async def metrics(url: str) -> Series:
    """Read `/metrics` once."""
    async with Connection.to(url) as connection:
        answer = await connection.ask("GET", "/metrics")
    lines = (line for line in answer.body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def total(series: Series, name: str) -> float:
    """Sum of one name over all its labels."""
    return sum(value for key, value in series.items() if key.partition("{")[0] == name)


@contextlib.asynccontextmanager
async def channels_into(cluster: LocalCluster) -> AsyncIterator[ChannelPool]:
    """Connections to the nodes' internal ports, with the cluster's token."""
    channels = ChannelPool(trust=load_trust(InternalConfig(token_file=cluster.token_file), "127.0.0.1"))
    try:
        yield channels
    finally:
        await channels.close()


async def describe(cluster: LocalCluster) -> list[NodeInfo]:
    """Ask every node directly, rather than the router for its last report."""
    infos = []
    async with channels_into(cluster) as channels:
        for child in cluster.children[1:]:
            client = PrefillClient if child.name.startswith("prefill") else DecodeClient
            infos.append(await client(child.ready["address"], channels).describe())
    return infos


def memory_mib(cluster: LocalCluster) -> dict[str, float]:
    """Resident memory of every running process, in MiB. Raises `psutil.NoSuchProcess` for one that has just died."""
    return {
        child.name: psutil.Process(child.process.pid).memory_info().rss / 2**20
        for child in cluster.children
        if child.process.returncode is None
    }


def processor_s(cluster: LocalCluster) -> dict[str, float]:
    """Processor time of every running process so far, in seconds. Raises as `memory_mib` does."""
    running = (child for child in cluster.children if child.process.returncode is None)
    times = {child.name: psutil.Process(child.process.pid).cpu_times() for child in running}
    return {name: float(used.user + used.system) for name, used in times.items()}


def dead(cluster: LocalCluster) -> list[str]:
    """Names of the processes that have ended."""
    return [child.name for child in cluster.children if child.process.returncode is not None]


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> float:
    """Poll until `condition` holds; return the seconds it took. Raises `TimeoutError` naming `what`."""
    began = monotonic()
    while not await condition():
        if monotonic() - began > timeout_s:
            raise TimeoutError(f"{what} did not come true within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
    return monotonic() - began


def load_note() -> str:
    """The number of cores and the load of the machine, for the record beside a measurement."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load average {one:.1f} (1 min), {five:.1f} (5 min)"
