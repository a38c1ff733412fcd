"""`python -m bench.simulator`: how fast the simulator is, and how much memory it takes.

A million requests on 1,000 replicas, half of them for prefill, with 16 routers: the live schedulers plan every step.
The target is 60 s and 4 GB on one core.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from collections.abc import Sequence
from time import perf_counter

from sim.cluster import Cluster, Options
from sim.spec import Codec, Load, Network, Policy, Pool, Sending, Spec
from sim.workload import synthetic

TARGET_S, TARGET_GB = 60.0, 4.0


def fleet(requests: int, replicas: int, rate: float, shape: str) -> Spec:
    """A cluster of equal machines."""
    pool = Pool(instance="p4de.24xlarge", replicas=replicas // 2)
    return Spec(
        model="mistral-7b",
        prefill=pool,
        decode=pool,
        codec=Codec(name="rot-k4v4"),
        network=Network(sending=Sending.AFTER),
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
    args = parser.parse_args(arguments)
    spec = fleet(args.requests, args.replicas, args.rate, args.shape)
    arrivals = synthetic(spec.load, 0)
    gc.freeze()  # a million arrivals that stay need not be looked at again and again
    began = perf_counter()
    outcome = Cluster(spec, Options()).run(arrivals)
    seconds = perf_counter() - began
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    steps, events = sum(replica.tally.steps for replica in outcome.decodes), outcome.log.counts.total()
    print(
        f"{args.requests:,} requests of {args.shape} on {args.replicas:,} replicas: {seconds:.1f} s, {memory_gb:.2f} GB"
    )
    print(f"{args.requests / seconds:,.0f} requests/s, {events / seconds:,.0f} events/s, {steps:,} decode steps")
    print(
        f"target {TARGET_S:g} s and {TARGET_GB:g} GB; "
        f"{int(outcome.rows.ok.sum()):,} served; log {outcome.log.hexdigest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
