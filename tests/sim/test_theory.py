"""The simulator agrees with queueing theory within 2%, with fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np
import pytest
from hack_kernels.window import OWN_PAGE_ONLY

from hackkv.footprint import Footprint
from measure.serve.arrivals import arrival_times
from sim.cluster import Cluster
from sim.jobs import Arrival
from sim.network import Flow, Network, SharedLink
from sim.network_spec import LinkSharing
from sim.spec import Efficiency, ReplicaPool, Spec
from sim.world import World
from tests.sim.clusters import Drawn, small

TOLERANCE = 0.02
INSTANT = Efficiency(setup_s=0.0)


def one_at_a_time(servers: int, *, prefills: bool) -> Spec:
    """A cluster in which every server, of one role, serves one request at a time."""
    slots = ReplicaPool(instance="p4de.24xlarge", replicas=servers, max_sequences=1, max_batch=1, chunk_tokens=1 << 16)
    many = ReplicaPool(instance="p4de.24xlarge", replicas=1, max_sequences=256, chunk_tokens=1 << 16)
    pools: dict[str, Any] = {"prefill": slots, "decode": many} if prefills else {"prefill": many, "decode": slots}
    return small(efficiency=INSTANT, **pools)


def mean_jct(spec: Spec, draw: Callable[[], float], rate: float, count: int, *, prefills: bool) -> float:
    times = arrival_times(count, rate, 1.0, np.random.default_rng(7))
    arrivals = [Arrival(at_s, 64, 1 if prefills else 2) for at_s in times]
    cost = Drawn(draw, prefills)
    rows = Cluster(spec, costs=lambda *_: cost).run(arrivals).rows
    assert rows.ok.all()
    return float(np.mean(rows["e2el_s"][count // 20 :]))


@pytest.mark.slow
@pytest.mark.parametrize("prefills", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_server_with_exponential_times_is_m_m_1(prefills: bool) -> None:
    rng = np.random.default_rng(3)
    load = 0.6
    found = mean_jct(
        one_at_a_time(1, prefills=prefills), lambda: float(rng.exponential(1.0)), load, 60_000, prefills=prefills
    )
    assert found == pytest.approx(1 / (1 - load), rel=TOLERANCE)


def m_d_c_wait(load: float, servers: int) -> float:
    """Mean wait of M/D/c in service times (Crommelin). One service time later, the system has the requests that arrived
    meanwhile and those that had no server."""
    most, offered = 300, load * servers
    arrived = np.empty(most)
    arrived[0] = exp(-offered)
    for count in range(1, most):
        arrived[count] = arrived[count - 1] * offered / count
    moves = np.zeros((most, most))
    for count in range(most):
        rest = max(0, count - servers)
        moves[count, rest:] = arrived[: most - rest]
    share = np.full(most, 1 / most)
    for _ in range(5_000):
        share = share @ moves
    share /= share.sum()
    waiting = float(np.maximum(np.arange(most) - servers, 0) @ share)
    return waiting / offered


@pytest.mark.slow
def test_many_servers_with_equal_times_are_m_d_c() -> None:
    load, servers = 0.75, 3
    found = mean_jct(one_at_a_time(servers, prefills=False), lambda: 1.0, load * servers, 50_000, prefills=False)
    assert found == pytest.approx(1 + m_d_c_wait(load, servers), rel=TOLERANCE)


@pytest.mark.slow
def test_a_shared_link_is_m_g_1_with_processor_sharing() -> None:
    world = World(Footprint(64, 1, 1, 1, window=OWN_PAGE_ONLY), 1)
    network = Network(world, LinkSharing.FAIR)
    rng, load, count = np.random.default_rng(11), 0.6, 60_000
    sizes = np.where(rng.random(count) < 0.8, 0.5, 3.0)  # mean 1
    times, link, took = np.cumsum(rng.exponential(1 / load, count)), SharedLink("line", 1.0), list[float]()

    def send(number: int) -> None:
        began = world.now
        flow = Flow((link,), 1e9, lambda: took.append(world.now - began))
        network.start(flow, float(sizes[number]))
        if number + 1 < count:
            world.after(float(times[number + 1]) - world.now, lambda: send(number + 1))

    world.after(float(times[0]), lambda: send(0))
    world.run()
    assert len(took) == count
    assert np.mean(took[count // 20 :]) == pytest.approx(1 / (1 - load), rel=TOLERANCE)
    assert network.bytes == pytest.approx(sizes.sum())
