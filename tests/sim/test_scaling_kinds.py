"""Several kinds of replicas that follow the load: which starts first, which stops last, and a whole cluster of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.catalogue import shipped
from sim.cluster import Options, SimulationOutcome
from sim.costs import Roofline
from sim.eventlog import EventKind
from sim.jobs import Arrival
from sim.placing import Shelf
from sim.plan.following import follow
from sim.plan.objective import parse
from sim.plan.report import report
from sim.plan.screen import candidates, demand_of
from sim.plan.search import spec_of, try_out
from sim.rooms import names
from sim.scaling import TICK_S, Kind, Staff, Watched
from sim.shards import simulate
from sim.sizes import sizes_of
from sim.spec import Choices, Codec, Load, Objective, ReplicaPool, Scale, Spec
from sim.summary import summarize
from sim.world import World
from sim.worth import TypicalRequest, goodput
from tests.sim.clusters import run, small
from tests.sim.test_cluster import check_books
from tests.sim.test_scaling import scaled, waves

AT_ONCE = Scale(least=0, up_at=10.0, down_at=2.0, start_s=0.0, down_after_s=0.0)
KV = shipped().models["mistral-7b"].kv_shape


def kinds(*numbers: tuple[float, float, Scale | None]) -> list[Kind]:
    """Kinds of (goodput, price, scale)."""
    return [Kind(f"kind.{at}", scale, good, usd / good) for at, (good, usd, scale) in enumerate(numbers)]


@dataclass
class Team:
    """A controller whose load a test sets."""

    kinds: list[Kind]
    kind_of: list[int]
    load: float = 0.0

    def __post_init__(self) -> None:
        self.world = World(sizes_of(Codec(name="fp16"), KV).footprint, 1)
        self.shelf = Shelf(names(len(self.kind_of)), [0] * len(self.kind_of), 64)
        watched = Watched(lambda _: self.load, lambda _: True, lambda: None)
        self.staff = Staff(self.world, self.kinds, self.kind_of, self.shelf, watched)

    @property
    def up(self) -> list[int]:
        """The replicas that take requests."""
        return [index for index, up in enumerate(self.shelf.up) if up]

    def after(self, load: float, seconds: float = 60.0) -> list[int]:
        """The replicas that take requests after one more look at the load."""
        self.load = load
        self.world.now += seconds
        self.staff.tick()
        self.world.run()
        return self.up


def test_the_kind_of_least_cost_per_goodput_starts_first_and_stops_last() -> None:
    """Kind 0 is the cheaper replica, kind 1 the cheaper goodput."""
    team = Team(kinds((1.0, 2.0, AT_ONCE), (4.0, 6.0, AT_ONCE)), [0, 0, 1, 1])
    assert team.up == [2]
    assert team.after(20.0) == [2, 3]
    assert team.after(10.5) == [0, 2, 3]
    assert team.after(10.5) == [0, 1, 2, 3]
    assert [team.after(0.0) for _ in range(4)] == [[0, 2, 3], [2, 3], [2], [2]]


def test_a_fast_kind_counts_for_more() -> None:
    """Four times the goodput is asked for: one replica of 3 beside the one of 1, or three more of 1."""
    assert Team(kinds((1.0, 1.0, AT_ONCE), (3.0, 9.0, AT_ONCE)), [0, 1, 1]).after(40.0) == [0, 1]
    assert Team(kinds((1.0, 1.0, AT_ONCE), (3.0, 9.0, AT_ONCE)), [0, 0, 0, 0, 1]).after(40.0) == [0, 1, 2, 3]


def test_kinds_without_scale_and_the_least_of_others_never_stop() -> None:
    two = AT_ONCE.model_copy(update={"least": 2})
    team = Team(kinds((1.0, 9.0, None), (1.0, 1.0, AT_ONCE), (1.0, 5.0, two)), [0, 0, 1, 1, 2, 2, 2])
    always = [0, 1, 2, 4, 5]
    assert team.up == always
    assert team.after(100.0) == list(range(7))
    for _ in range(5):
        team.after(0.0)
    assert team.up == always
    assert set(team.staff.paid_s) == {"kind.1", "kind.2"}


@given(st.lists(st.floats(0, 60), max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_a_role_is_never_without_a_replica(loads: list[float], kind_of: list[int]) -> None:
    team = Team(kinds((1.0, 2.0, AT_ONCE), (4.0, 6.0, AT_ONCE), (2.0, 9.0, AT_ONCE)), kind_of)
    for load in loads:
        before = len(team.up)
        assert max(1, before - 1) <= len(team.after(load)) <= len(kind_of)


def test_worth_follows_speed_and_price() -> None:
    """An L4 has more FLOP/s than an A10G for fewer dollars; an A100 costs most and decodes at least cost."""
    spec, request = scaled(), TypicalRequest(6000, 150)
    served = {}
    for role, instances in (("prefill", ("g5.12xlarge", "g6.12xlarge")), ("decode", ("g5.12xlarge", "p4de.24xlarge"))):
        for instance in instances:
            pool = ReplicaPool(instance=instance, replicas=1, tp=4)
            sizes = sizes_of(spec.codec, KV)
            cost = Roofline(spec.shape, spec.gpu_of(pool), spec.efficiency, sizes, 4, 1)
            good = goodput(spec, role, pool, sizes, cost, request)
            served[role, instance] = good, spec.usd_of(pool) / good
            slow = goodput(
                spec.model_copy(update={"slo": Objective(tpot=0.001)}), role, pool, sizes, cost, request
            )  # a limit that no batch keeps
            assert slow == good if role == "prefill" else 0 < slow < good
    assert served["prefill", "g6.12xlarge"][0] > served["prefill", "g5.12xlarge"][0]
    assert served["prefill", "g6.12xlarge"][1] < served["prefill", "g5.12xlarge"][1]
    assert served["decode", "p4de.24xlarge"][0] > served["decode", "g5.12xlarge"][0]


def two_kinds(**fields: Any) -> Spec:
    """The cluster of `scaled`, each role with a second kind of replicas."""
    one = scaled()
    prefill, decode = one.prefill[0], one.decode[0]
    assert prefill.scale is not None
    assert decode.scale is not None
    none_fixed = {"scale": prefill.scale.model_copy(update={"least": 0})}
    return small(
        prefill=[
            prefill.model_copy(update={"replicas": 3}),
            prefill.model_copy(update={"instance": "g6.12xlarge", "replicas": 3, **none_fixed}),
        ],
        decode=[
            decode.model_copy(update={"replicas": 3}),
            decode.model_copy(update={"replicas": 3, "pages": 500}),
        ],
        **fields,
    )


def dense() -> list[Arrival]:
    """The waves of one kind's test, three times as dense: a cluster of two kinds has more replicas from the start."""
    return sorted(waves() * 3, key=lambda arrival: arrival.at_s)


@pytest.fixture(scope="module")
def outcome() -> SimulationOutcome:
    return run(two_kinds(), dense())


def test_everybody_is_served_and_books_are_even(outcome: SimulationOutcome) -> None:
    assert outcome.rows.ok.all()
    check_books(outcome)
    assert outcome.log.counts[EventKind.SCALED] >= 8
    for pool in summarize(outcome.record)["pools"]:
        assert pool["tokens"], pool


def test_kinds_come_and_go_and_are_paid_each(outcome: SimulationOutcome) -> None:
    span, spec, paid, usd = outcome.duration_s, outcome.spec, outcome.paid_s, 0.0
    assert set(paid) == {"prefill.0", "prefill.1", "decode.0", "decode.1"}
    for role, pools in spec.roles.items():
        for index, pool in enumerate(pools):
            assert pool.scale is not None
            ran_s = paid[spec.key_of(role, index)]
            assert pool.scale.least * (span - TICK_S) <= ran_s < 0.8 * pool.replicas * span
            usd += ran_s / 3600 * spec.usd_of(pool)
    assert summarize(outcome.record)["usd_per_request"] == pytest.approx(usd / len(dense()))


@pytest.mark.parametrize("shards", [1, 2])
def test_equal_seeds_give_equal_events(shards: int) -> None:
    spec = two_kinds(policy={"shards": shards})
    first, second = (simulate(spec, dense(), Options(seed=3)) for _ in range(2))
    assert first.rows.ok.all()
    assert (first.events, first.paid_s) == (second.events, second.paid_s)


# A plan -------------------------------------------------------------------------------------------------------------


def question() -> Spec:
    """Mistral-7B on machines of two kinds for prompts, whose replicas follow the load."""
    prefill = ReplicaPool(
        instance="g5.12xlarge", replicas=1, tp=4, chunk_tokens=2048, scale=Scale(up_at=3, down_at=0.1)
    )
    decode = ReplicaPool(instance="p4de.24xlarge", replicas=1, scale=Scale(up_at=0.5, down_at=0.1))
    plan = Choices(
        prefill=("g5.12xlarge", "g6.12xlarge"),
        decode=("p4de.24xlarge",),
        tp=(1, 4),
        pp=(1,),
        codecs=(Codec(name="rot-k4v4"),),
        aggregated=False,
        available={"g5.12xlarge": 3, "g6.12xlarge": 2, "p4de.24xlarge": 1},
    )
    load = Load(input_len=4000, output_len=100)
    return Spec(model="mistral-7b", prefill=(prefill,), decode=(decode,), load=load, plan=plan)


@pytest.mark.slow
def test_a_plan_of_several_kinds_follows_a_rising_load() -> None:
    spec = question()
    demand = demand_of(spec, 7.0, parse("ttft_p90=3s,tpot_p90=60ms"))
    mix = next(one for one in candidates(spec, demand) if len(one.prefill) == 2)
    trial = try_out(spec, mix, demand, 300, 0)
    assert all(pool.scale is None for pool in spec_of(spec, trial.candidate, trial.rate, 1).pools)
    first = follow(spec, trial, demand, 0)
    assert first is not None
    assert 0.1 * trial.usd < first.usd_per_hour < 0.9 * trial.usd
    started = [part for role, part, _ in first.running if role == "prefill"]
    assert [part.role_usd for part in started] == sorted(part.role_usd for part in mix.prefill)
    for _, part, mean in first.running:
        assert 0 <= mean <= part.count
    page = "\n".join(report(spec, demand, [trial], "hackkv plan", followed=first))
    assert "## When replicas follow the load" in page
