"""`python -m sim.nodes --set spec=SPEC.yaml --set router=HOST:PORT`: a specification's nodes without weights.

This program registers real prefill and decode nodes with a router, hundreds in this one process if need be. Each
listens on a port of its own, schedules, sends KV and speaks gRPC as a node does, but its passes and steps only sleep
(`sim.weightless`). So routers are tested at a scale for which the GPUs are not there. A process runs at most some
thousand steps a second. With more, sleeps end late; use several processes for one fleet.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_node.__main__ import serve as serve_decode
from decode_node.config import DecodeConfig
from hackkv.config import CodecConfig, ModelConfig, RoleConfig
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model
from hackkv.model.worker import Worker
from node.process import Shutdown, run_role
from node.shell import Loaded
from prefill_node.__main__ import serve as serve_prefill
from prefill_node.config import PrefillConfig
from sim.capacity import host_bytes_of, pages_of
from sim.sizes import sizes_of
from sim.spec import ReplicaPool, Spec, read_spec
from sim.weightless import weightless_worker
from transport.closing import reap


class FleetConfig(RoleConfig):
    """The nodes to serve, and their router."""

    spec: Path
    """The file, as for `hackkv simulate`. Its pools say how many nodes there are, and how long work takes."""
    router: str = ""
    """Control address (host:port) of the router."""
    model: str = ""
    """The checkpoint that the router tokenizes for: folder or hub name; empty is the shipped one. No weight is read."""
    first: int = 0
    """Number of the first node of each role, if several processes serve one fleet."""


async def serve(config: FleetConfig, shutdown: Shutdown) -> None:
    """Run every node of a specification until told to end. Raises `ConfigError`, or the error of the first failed node.

    Each node ends by itself: a node that has drained does not stop the others.
    """
    spec, folder = read_spec(config.spec), find_model(config.model).path
    if not spec.prefill:
        raise ConfigError(f"{config.spec}: prefill: replicas that do both are simulated (hackkv simulate), not served")
    ends: list[Shutdown] = []
    passing_on = asyncio.create_task(_pass_on(shutdown, ends))
    try:
        async with asyncio.TaskGroup() as group:
            for role, pools in spec.roles.items():
                first = config.first
                for pool in pools:
                    loaded, settings = _prepared(config, spec, pool, folder)
                    for number in range(first, first + pool.replicas):
                        ends.append(end := Shutdown())
                        node = {**settings, "node_id": f"{role}-{number}"}
                        if role == "prefill":
                            group.create_task(serve_prefill(_prefill(node, pool), end, loaded))
                        else:
                            group.create_task(serve_decode(_decode(node, pool), end, loaded))
                    first += pool.replicas
    finally:
        await reap(passing_on)


async def _pass_on(shutdown: Shutdown, ends: Sequence[Shutdown]) -> None:
    await shutdown.drain.wait()
    for end in ends:
        end.drain.set()
    await shutdown.stop.wait()
    for end in ends:
        end.order()


def _prepared(config: FleetConfig, spec: Spec, pool: ReplicaPool, folder: Path) -> tuple[Loaded, dict[str, Any]]:
    """Settings that the nodes of a pool share. They have as many pages as a replica; thin pages take less memory."""
    worker = weightless_worker(spec, pool, folder)
    codec = CodecConfig(name=spec.codec.name, settings=spec.codec.settings, allow_loss=True)
    loaded = Loaded(ModelConfig(threads=1), codec, worker)
    return loaded, {
        "router": config.router,
        "internal": config.internal,
        "log_level": config.log_level,
        "model": loaded.model,
        "codec": loaded.codec,
        **_room(spec, pool, worker),
    }


def _room(spec: Spec, pool: ReplicaPool, worker: Worker) -> dict[str, int]:
    sizes, thin = sizes_of(spec.codec, spec.shape.kv_shape), worker.footprint
    host_pages = host_bytes_of(spec, pool) // sizes.footprint.page_bytes
    return {
        "kv_bytes": pages_of(spec, pool, sizes) * thin.page_bytes,
        "host_bytes": max(1, host_pages * thin.wire_page_bytes),
    }


def _prefill(node: dict[str, Any], pool: ReplicaPool) -> PrefillConfig:
    return PrefillConfig(**node, max_prompts=pool.max_sequences, chunk_tokens=pool.chunk_tokens)


def _decode(node: dict[str, Any], pool: ReplicaPool) -> DecodeConfig:
    return DecodeConfig(
        **node, max_sequences=pool.max_sequences, max_batch=pool.max_batch, replay_tokens=pool.replay_tokens
    )


if __name__ == "__main__":
    sys.exit(run_role("nodes", FleetConfig, serve))
