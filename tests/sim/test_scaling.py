"""Replicas follow the load: the rules alone, and in a whole cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.plan import FaultPlan
from hackkv.errors import ConfigError
from sim.cluster import Cluster, SimulationOutcome
from sim.eventlog import EventKind
from sim.jobs import Arrival
from sim.scaling import STEP_DOWN_S, TICK_S, Scaler
from sim.spec import ReplicaPool, Scale, Spec
from sim.summary import summarize
from tests.sim.clusters import run, small
from tests.sim.test_cluster import check_books

SCALE = Scale(up_at=10.0, down_at=2.0, start_s=30.0, down_after_s=300.0)


def wanted(scaler: Scaler, running: int, load: float, now: float, most: int = 8) -> int:
    """How many of `most` equal replicas should run."""
    return max(SCALE.least, running + scaler.change(running, [1.0] * (most - running), load, now))


@pytest.mark.parametrize(
    ("running", "load", "then"), [(1, 10.0, 1), (1, 10.1, 2), (2, 25.0, 5), (4, 100.0, 8), (3, 5.0, 3), (3, 2.0, 3)]
)
def test_up_at_once_by_as_many_as_it_takes(running: int, load: float, then: int) -> None:
    assert wanted(Scaler(SCALE), running, load, 0.0) == then


@pytest.mark.parametrize(
    ("spare", "count"), [([4.0, 1.0], 1), ([1.0, 1.0, 4.0], 3), ([1.0, 1.0, 1.0, 1.0, 1.0], 4), ([1.0], 1), ([], 0)]
)
def test_fast_replicas_count_for_more(spare: list[float], count: int) -> None:
    """Replicas that serve 2 requests/s have three times the load that they should have, so 4 are missing."""
    assert Scaler(SCALE).change(2.0, spare, 30.0, 0.0) == count


def test_down_one_by_one_after_a_long_quiet() -> None:
    scaler, running, left = Scaler(SCALE), 3, []
    for second in range(0, 600, 15):
        then = wanted(scaler, running, 0.0, float(second))
        if then < running:
            left.append(second)
        running = then
    assert left == [300, 300 + STEP_DOWN_S]
    assert running == SCALE.least


def test_a_busy_moment_starts_the_quiet_anew() -> None:
    scaler = Scaler(SCALE)
    loads = ((0.0, 0.0), (299.0, 5.0), (301.0, 0.0), (600.0, 0.0))
    assert [wanted(scaler, 3, load, at) for at, load in loads] == [3] * 4
    assert wanted(scaler, 3, 0.0, 601.0) == 2


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 400)), max_size=60), st.integers(1, 20))
def test_never_more_than_the_most_and_down_by_one(steps: list[tuple[float, float]], most: int) -> None:
    scaler, running, now = Scaler(SCALE), 1, 0.0
    for load, later in steps:
        now += later
        then = wanted(scaler, running, load, now, most)
        assert max(SCALE.least, running - 1) <= then <= most
        running = then


def scaled() -> Spec:
    prefill = ReplicaPool(
        instance="g5.12xlarge", replicas=6, tp=4, chunk_tokens=2048, scale=SCALE.model_copy(update={"up_at": 3.0})
    )
    decode = ReplicaPool(
        instance="p4de.24xlarge", replicas=5, pages=800, scale=Scale(up_at=0.5, down_at=0.1, down_after_s=300.0)
    )
    return small(prefill=prefill, decode=decode)


def waves() -> list[Arrival]:
    """A burst, a long quiet time with few requests, and another burst."""
    burst = [Arrival(0.5 * number, 6000, 150) for number in range(150)]
    quiet = [Arrival(200.0 + 60 * number, 500, 10) for number in range(25)]
    return [*burst, *quiet, *(Arrival(1800.0 + each.at_s, 6000, 150) for each in burst)]


@pytest.fixture(scope="module")
def outcome() -> SimulationOutcome:
    return run(scaled(), waves())


def test_everybody_is_served_and_books_are_even(outcome: SimulationOutcome) -> None:
    assert outcome.rows.ok.all()
    check_books(outcome)
    assert outcome.log.counts[EventKind.SCALED] >= 4


def test_it_costs_less_than_all_and_more_than_the_least(outcome: SimulationOutcome) -> None:
    span = outcome.duration_s
    for role, most in (("prefill", 6), ("decode", 5)):
        assert span - TICK_S <= outcome.paid_s[role] < 0.8 * most * span
    all_the_time = Cluster(small(prefill=without(outcome.spec.prefill[0]), decode=without(outcome.spec.decode[0])))
    fixed = all_the_time.run(waves())
    assert summarize(outcome.record)["usd_per_request"] < summarize(fixed.record)["usd_per_request"]
    assert outcome.rows["ttft_s"].mean() > fixed.rows["ttft_s"].mean()


def without(pool: ReplicaPool) -> ReplicaPool:
    return pool.model_copy(update={"scale": None})


def test_faults_beside_it_are_refused() -> None:
    plan = FaultPlan.model_validate({"rules": [{"at": "decode.landed", "do": "kill", "node": "decode-0"}]})
    with pytest.raises(ConfigError, match="one that scales"):
        Cluster(scaled().model_copy(update={"faults": plan}))


def test_a_band_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="down_at 2 is not below up_at 1"):
        Scale(up_at=1, down_at=2)
