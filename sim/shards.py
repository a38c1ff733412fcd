"""A simulation of several routers, one after another or in processes of their own.

A router shares nothing with others: neither replicas nor links nor, in an open loop, requests. So the part of a router
is a simulation by itself. Small simulations are also faster than one large one: their state stays in caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import xxhash

from sim.cluster import Cluster, Options
from sim.jobs import Arrival
from sim.results import RequestTable, SimulationRecord
from sim.spec import Spec


def simulate(spec: Spec, arrivals: Sequence[Arrival], options: Options, processes: int = 1) -> SimulationRecord:
    """Serve all requests. The result does not depend on `processes`.

    Clients of a closed loop go from router to router, so these routers are simulated together.
    """
    if spec.policy.shards == 1 or spec.load.concurrency:
        return Cluster(spec, options).run(arrivals).record
    whole = SimulationRecord(spec, RequestTable(range(len(arrivals))), "", Counter(), [], [], [], {})
    digest = xxhash.xxh3_128()
    for part in _parts(spec, arrivals, options, processes):
        whole.rows.take(part.rows)
        digest.update(bytes.fromhex(part.events))
        whole.counts.update(part.counts)
        whole.prefills += part.prefills
        whole.decodes += part.decodes
        whole.links_s += part.links_s
        for role, seconds in part.paid_s.items():
            whole.paid_s[role] = whole.paid_s.get(role, 0.0) + seconds
        whole.spans += part.spans
        whole.jobs += part.jobs
        options.on_over(whole.rows.filled)
    whole.events = digest.hexdigest()
    return whole


def _parts(spec: Spec, arrivals: Sequence[Arrival], options: Options, processes: int) -> Iterator[SimulationRecord]:
    """The record of each router, in the order of the routers."""
    shards = spec.policy.shards
    own = Options(options.seed, options.macro, options.keep_spans)
    if processes == 1:
        for shard in range(shards):
            yield _part(spec, arrivals[shard::shards], own, shard)
        return
    with ProcessPoolExecutor(min(processes, shards), get_context("spawn")) as pool:
        todo = [pool.submit(_part, spec, arrivals[shard::shards], own, shard) for shard in range(shards)]
        for future in todo:
            yield future.result()


def _part(spec: Spec, arrivals: Sequence[Arrival], options: Options, shard: int) -> SimulationRecord:
    return Cluster(spec, options).run(arrivals, shard).record
