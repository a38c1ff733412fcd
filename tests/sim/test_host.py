"""Processes share the cores of their machine: work takes longer by the time that others take, and none is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hack_kernels.window import OWN_PAGE_ONLY
from hypothesis import given
from hypothesis import strategies as st

from faults.plan import FaultPlan
from hackkv.errors import ConfigError
from hackkv.footprint import Footprint
from sim import spec
from sim.cluster import Cluster
from sim.host import HostCores
from sim.jobs import Arrival
from sim.network_spec import NetworkSpec
from sim.world import World
from tests.sim.clusters import Drawn, run, small, stages

WORK = st.lists(st.tuples(st.floats(0, 20), st.floats(0.01, 10)), min_size=1, max_size=12)
"""Begin of each piece of work, and the seconds that it takes alone."""


def new_host(cores: float, **fields: Any) -> tuple[World, HostCores]:
    world = World(Footprint(64, 1, 1, 1, window=OWN_PAGE_ONLY), 1)
    return world, HostCores(world, spec.Host(cores=cores, **fields))


@pytest.mark.parametrize(
    ("cores", "alone", "ends"),
    [
        (2, [1.0, 1.0], [1.0, 1.0]),
        (2, [1.0, 1.0, 1.0], [1.5, 1.5, 1.5]),
        (1, [1.0, 2.0], [2.0, 3.0]),
        (1.5, [3.0, 3.0], [4.0, 4.0]),  # two threads of one core
        (4, [5.0], [5.0]),  # a thread takes one core at most
        (2, [1.0, 2.0, 3.0], [1.5, 2.5, 3.5]),  # 2/3 of a core each, then a whole core
    ],
)
def test_work_stretches_by_what_others_take(cores: float, alone: list[float], ends: list[float]) -> None:
    world, host = new_host(cores)
    ended: dict[int, float] = {}
    for number, seconds in enumerate(alone):
        host.compute(seconds, lambda number=number: ended.update({number: world.now}))  # type: ignore[misc]
    world.run()
    assert [ended[number] for number in range(len(alone))] == pytest.approx(ends)
    assert host.worked_s == pytest.approx(sum(alone))


@given(WORK, st.floats(0.5, 4))
def test_no_work_is_lost_and_none_is_faster_than_alone(work: list[tuple[float, float]], cores: float) -> None:
    world, host = new_host(cores)
    took: list[tuple[float, float]] = []

    def begin(seconds: float) -> None:
        began = world.now
        host.compute(seconds, lambda: took.append((seconds, world.now - began)))

    for at_s, seconds in work:
        world.after(at_s, lambda seconds=seconds: begin(seconds))  # type: ignore[misc]
    world.run()
    assert len(took) == len(work)
    assert host.worked_s == pytest.approx(sum(seconds for _, seconds in work))
    assert not host.cores.flows
    assert all(real >= seconds * (1 - 1e-9) for seconds, real in took)


@given(WORK)
def test_the_router_does_one_thing_after_another(work: list[tuple[float, float]]) -> None:
    """On free cores, work waits for the work that came before it (Lindley)."""
    world, host = new_host(2)
    ended: list[float] = []
    work = sorted(work)
    for at_s, seconds in work:
        world.after(at_s, lambda seconds=seconds: host.serve(seconds, lambda: ended.append(world.now)))  # type: ignore[misc]
    world.run()
    free = 0.0
    for (at_s, seconds), end in zip(work, ended, strict=True):
        free = max(free, at_s) + seconds
        assert end == pytest.approx(free)


@pytest.mark.slow
def test_a_host_of_two_cores_is_m_m_2() -> None:
    """With exponential work, the number in the system is that of M/M/2 (Erlang C) within 2%, for any split of cores."""
    world, host = new_host(2)
    rng, rate, count = np.random.default_rng(5), 1.4, 60_000
    times, sizes = np.cumsum(rng.exponential(1 / rate, count)), rng.exponential(1.0, count)
    took: list[float] = []

    def begin(number: int) -> None:
        began = world.now
        host.compute(float(sizes[number]), lambda: took.append(world.now - began))
        if number + 1 < count:
            world.after(float(times[number + 1]) - world.now, lambda: begin(number + 1))

    world.after(float(times[0]), lambda: begin(0))
    world.run()
    load = rate / 2
    assert np.mean(took[count // 20 :]) == pytest.approx(1 / (1 - load**2), rel=0.02)


BUSY = [Arrival(0.5 * number, 6000, 200) for number in range(60)]
"""More work than one prefill replica and one decode replica can do at a time."""


def on(cores: float, **fields: Any) -> spec.Spec:
    return small(1, 1, host=spec.Host(cores=cores, **fields))


def test_replicas_stretch_each_other_only_when_cores_run_out() -> None:
    alone = [Arrival(100.0 * number, 640, 20) for number in range(5)]
    for arrivals, cores in ((alone, 1), (alone, 99), (BUSY, 99)):
        free, shared = run(small(1, 1), arrivals), run(on(cores), arrivals)
        np.testing.assert_allclose(shared.rows.table, free.rows.table, rtol=1e-9, atol=1e-9)
    free, shared = run(small(1, 1), BUSY), run(on(1), BUSY)
    for stage in ("prefill_s", "decode_s"):
        assert free.rows[stage].sum() < shared.rows[stage].sum()
    np.testing.assert_allclose(stages(shared.rows), shared.rows["e2el_s"], rtol=1e-9)


def test_every_second_of_work_is_done_on_the_cores() -> None:
    """All work of passes, steps, handoffs, bytes, requests and tokens is done, and no core works more than its time."""
    network = NetworkSpec(request_s=0.25, call_s=0.125)
    of = small(1, 1, host=spec.Host(cores=1, step_s=0.003, token_s=0.001, byte_s=1e-8), network=network)
    cluster = Cluster(of, costs=lambda *_: Drawn(lambda: 0.5, prefills=True))
    outcome = cluster.run(BUSY)
    assert outcome.rows.ok.all()
    assert isinstance(cluster.world.cores, HostCores)
    done, passes, steps = cluster.world.cores.worked_s, outcome.prefills[0].tally, outcome.decodes[0].tally
    each = network.request_s + network.call_s + of.efficiency.setup_s
    work = len(BUSY) * each + 0.5 * (passes.passes + steps.steps) + 0.003 * steps.steps + 0.001 * steps.tokens
    assert done == pytest.approx(work + 1e-8 * outcome.rows["wire_bytes"].sum())
    assert done <= outcome.duration_s * (1 + 1e-9)


def test_equal_seeds_give_equal_logs_and_every_step_is_an_event() -> None:
    of = on(1.5, token_s=0.001).model_copy(update={"noise": 0.2})
    first, again, single = (run(of, BUSY[:10], seed=1, macro=macro) for macro in (True, True, False))
    assert first.log.hexdigest == again.log.hexdigest == single.log.hexdigest
    np.testing.assert_array_equal(first.rows.table, single.rows.table)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": {"shards": 2}},
        {"faults": FaultPlan.model_validate({"rules": [{"at": "decode.token", "do": "kill", "nth": 3}]})},
    ],
)
def test_what_a_host_cannot_have_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError), match="host"):
        run(small(host=spec.Host(cores=2), **fields), BUSY[:1])
