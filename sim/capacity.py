"""The resources of one replica: pages, host memory, durations, and its network line."""

from __future__ import annotations

import math

from hackkv.errors import ConfigError
from sim.costs import CostModel, Profiled, Roofline, read_profile
from sim.sizes import CodecSizes
from sim.spec import GIB, ReplicaPool, Spec

GBIT = 1e9 / 8
"""Bytes per second."""


def pages_of(spec: Spec, pool: ReplicaPool, sizes: CodecSizes) -> int:
    """Pages that fit beside weights, the reserve and the slots. Raises `ConfigError` if not even one page fits."""
    if pool.pages:
        return pool.pages
    gpu = spec.gpu_of(pool)
    memory = pool.gpus * gpu.memory_gb * 1e9 * (1 - pool.reserve) - spec.shape.total_weight_bytes
    pages = int((memory - pool.max_sequences * sizes.footprint.slot_bytes) // sizes.footprint.page_bytes)
    if pages < 1:
        raise ConfigError(
            f"{spec.role_of(pool)}: {pool.gpus} x {spec.instance_of(pool).gpu} have no room for KV: weights take "
            f"{spec.shape.total_weight_bytes / 1e9:.0f} GB, {pool.max_sequences} open pages "
            f"{pool.max_sequences * sizes.footprint.slot_bytes / 1e9:.0f} GB (tp, pp, max_sequences)"
        )
    return pages


def largest_request(spec: Spec, sizes: CodecSizes) -> int:
    """The most tokens of KV that one request can have when the cluster is empty. The request must fit every prefill
    replica, since any of them may get it, and the largest decode replicas. Raises `ConfigError` if no page fits."""
    pages = [max(pages_of(spec, pool, sizes) for pool in spec.decode)]
    for pool in spec.prefill:
        pages += [pages_of(spec, pool, sizes), host_bytes_of(spec, pool) // sizes.footprint.wire_page_bytes]
    return min(pages) * sizes.footprint.page_tokens


def host_bytes_of(spec: Spec, pool: ReplicaPool) -> int:
    """Host memory of one replica, in bytes."""
    instance = spec.instance_of(pool)
    share = 0.5 * instance.host_gib * pool.gpus / instance.gpus if pool.host_gib is None else pool.host_gib
    return int(share * GIB)


def cost_of(spec: Spec, pool: ReplicaPool, sizes: CodecSizes) -> CostModel:
    """The pool's cost model: measured if it names a profile, else by roofline."""
    if pool.profile is not None:
        return Profiled(read_profile(pool.profile))
    return Roofline(spec.shape, spec.gpu_of(pool), spec.efficiency_of(pool), sizes, pool.tp, pool.pp)


def line_of(spec: Spec, pool: ReplicaPool) -> float:
    """Bytes per second of a replica's line: the share of the instance's line that one pipeline stage has."""
    instance = spec.instance_of(pool)
    gbit_s = instance.network_gbit_s * min(1.0, pool.tp / instance.gpus)
    if spec.network.link_gbit_s:
        gbit_s = min(gbit_s, spec.network.link_gbit_s)
    return gbit_s * GBIT * spec.efficiency_of(pool).network


def flow_of(spec: Spec, pool: ReplicaPool) -> float:
    """The most bytes per second of one handoff: each GPU of a stage sends one flow."""
    instance = spec.instance_of(pool)
    if not instance.flow_gbit_s:
        return line_of(spec, pool)
    flows = pool.tp * instance.flow_gbit_s * GBIT * spec.efficiency_of(pool).network
    return min(line_of(spec, pool), flows)


def uplink_of(spec: Spec, pool: ReplicaPool) -> float:
    """Bytes per second of the uplink of a rack that is full of the pool's instances; infinite without racks."""
    rack = spec.network.rack
    if rack is None:
        return math.inf
    if rack.uplink_gbit_s:
        return rack.uplink_gbit_s * GBIT * spec.efficiency_of(pool).network
    lines = rack.instances * spec.instance_of(pool).gpus / pool.gpus
    return lines * line_of(spec, pool) / rack.oversubscription


def machines_of(spec: Spec, pool: ReplicaPool) -> float:
    """Instances that one replica takes; may be a fraction."""
    return pool.gpus / spec.instance_of(pool).gpus


def crossing_of(spec: Spec, pool: ReplicaPool) -> float:
    """Bytes per second that a replica gets when all replicas of its rack use the uplink at once; its line's rate if
    that is less."""
    rack = spec.network.rack
    if rack is None:
        return line_of(spec, pool)
    return min(line_of(spec, pool), uplink_of(spec, pool) * machines_of(spec, pool) / rack.instances)
