"""`python -m bench.simulator`: how fast the simulator is, and how much memory it takes.

A million requests run on 1,000 replicas, half of them for prefill, with 16 routers; the live schedulers plan every
step. Each router is simulated by itself, in as many processes as there are cores. The target is 60 s and 4 GB.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from collections.abc import Sequence
from time import perf_counter

from sim.cluster import Options
from sim.network_spec import NetworkSpec, Sending
from sim.shards import simulate
from sim.spec import Codec, Load, Policy, ReplicaPool, Spec
from sim.workload import synthetic

TARGET_S, TARGET_GB = 60.0, 4.0


def fleet(requests: int, replicas: int, rate: float, shape: str) -> Spec:
    """A cluster of equal machines."""
    pool = ReplicaPool(instance="p4de.24xlarge", replicas=replicas // 2)
    return Spec(
        model="mistral-7b",
        prefill=(pool,),
        decode=(pool,),
        codec=Codec(name="rot-k4v4"),
        network=NetworkSpec(sending=Sending.AFTER),
        policy=Policy(shards=max(1, replicas // 62)),
        load=Load(shape=shape, rate=rate, requests=requests),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; the exit code is 0 whatever the speed."""
    parser = argparse.ArgumentParser("python -m bench.simulator", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=2_000.0, help="requests per second")
    parser.add_argument("--shape", default="imdb")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each core")
    args = parser.parse_args(arguments)
    spec = fleet(args.requests, args.replicas, args.rate, args.shape)
    arrivals = synthetic(spec.load, 0)
    gc.freeze()  # the collector need not scan a million lasting arrivals again and again
    began = perf_counter()
    record = simulate(spec, arrivals, Options(), args.processes)
    seconds = perf_counter() - began
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    memory_gb = (used[0].ru_maxrss + args.processes * used[1].ru_maxrss) / 1e6  # ru_maxrss: the largest of the children
    computed_s = sum(each.ru_utime + each.ru_stime for each in used)
    steps, events = sum(tally.steps for tally in record.decodes), record.counts.total()
    print(
        f"{args.requests:,} requests of {args.shape} on {args.replicas:,} replicas in {args.processes} processes: "
        f"{seconds:.1f} s, {computed_s:.0f} s of processor time with the making of requests, {memory_gb:.2f} GB"
    )
    print(f"{args.requests / seconds:,.0f} requests/s, {events / seconds:,.0f} events/s, {steps:,} decode steps")
    print(f"target {TARGET_S:g} s and {TARGET_GB:g} GB; {int(record.rows.ok.sum()):,} served; log {record.events}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
