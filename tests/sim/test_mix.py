"""Several kinds of replicas in one role: in a cluster, and in a plan."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sim.capacity import largest_request, pages_of
from sim.catalogue import Catalogue, shipped
from sim.cluster import Cluster
from sim.plan.idle import idle
from sim.plan.mix import cheapest_mix
from sim.plan.objective import parse
from sim.plan.parts import Part
from sim.plan.report import report
from sim.plan.screen import ServiceTarget, candidates, candidates_of, demand_of, prefill_part, rig_choice
from sim.plan.search import most, settle, try_out
from sim.spec import Choices, Codec, Load, ReplicaPool, Scale, Spec
from sim.summary import summarize
from sim.workload import synthetic
from tests.sim.clusters import run, small
from tests.sim.test_cluster import check_books

A10G = ReplicaPool(instance="g5.12xlarge", replicas=2, tp=4, chunk_tokens=2048)
L4 = ReplicaPool(instance="g6.12xlarge", replicas=3, tp=4, chunk_tokens=2048)
A100 = ReplicaPool(instance="p4de.24xlarge", replicas=1)
LIMITS = parse("ttft_p90=3s,tpot_p90=60ms")


def mixed(**fields: Any) -> Spec:
    """A cluster with two kinds of prefill replicas and two of decode replicas."""
    return small(prefill=[A10G, L4], decode=[A100, A100.model_copy(update={"replicas": 2, "pages": 400})], **fields)


def question(**available: int) -> Spec:
    """A plan of Mistral-7B on instances of which only `available` exist."""
    names = tuple(name.replace("_", ".") for name in available)
    plan = Choices(
        prefill=names,
        decode=names,
        tp=(1, 4),
        pp=(1,),
        codecs=(Codec(name="rot-k4v4"),),
        aggregated=False,
        available=dict(zip(names, available.values(), strict=True)),
    )
    return Spec(
        model="mistral-7b", prefill=(A10G,), decode=(A100,), load=Load(input_len=4000, output_len=100), plan=plan
    )


def test_one_pool_and_a_list_of_one_are_the_same() -> None:
    one, listed = (small(decode=decode) for decode in (A100, [A100]))
    assert one == listed
    assert Spec.model_validate(one.model_dump()) == one


def test_kinds_of_a_role_follow_one_load() -> None:
    first, second = (
        kind.model_copy(update={"scale": Scale(up_at=up_at, down_at=1)}) for kind, up_at in ((A10G, 2), (L4, 3))
    )
    with pytest.raises(ValidationError, match="prefill: kinds that scale differ in up_at"):
        small(prefill=[first, second])


def test_prices_of_all_kinds_sum_up() -> None:
    assert mixed().usd_per_hour() == pytest.approx(2 * 5.67 + 3 * 4.60 + 3 * 27.45 / 8)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_kind_works_and_nothing_is_lost(shards: int) -> None:
    spec = mixed(policy={"shards": shards}, load=Load(shape="arxiv", rate=3.0, requests=300))
    outcome = run(spec, synthetic(spec.load, 0))
    assert outcome.rows.ok.all()
    check_books(outcome)
    pools = summarize(outcome.record)["pools"]
    assert [(pool["role"], pool["instance"], pool["replicas"]) for pool in pools] == [
        ("prefill", "g5.12xlarge", 2),
        ("prefill", "g6.12xlarge", 3),
        ("decode", "p4de.24xlarge", 1),
        ("decode", "p4de.24xlarge", 2),
    ]
    assert all(pool["tokens"] > 0 and 0 < pool["busy"] < 1 for pool in pools)
    assert sum(pool["tokens"] for pool in pools[:2]) == outcome.rows["input_length"].sum()
    usd = summarize(outcome.record)["usd_per_hour"]
    assert usd == pytest.approx(spec.usd_per_hour())


def test_macro_steps_equal_single_steps() -> None:
    spec = mixed()
    arrivals = synthetic(spec.load, 1)
    whole, single = run(spec, arrivals), run(spec, arrivals, macro=False)
    np.testing.assert_allclose(whole.rows.table, single.rows.table, rtol=1e-9, atol=1e-9)


def test_what_a_small_kind_cannot_hold_goes_to_the_large_one() -> None:
    spec = mixed(load=Load(input_len=30_000, output_len=20, rate=0.2, requests=40))
    outcome = run(spec, synthetic(spec.load, 0))
    sizes = Cluster(spec).sizes
    assert pages_of(spec, spec.decode[1], sizes) * sizes.footprint.page_tokens < 30_020
    assert largest_request(spec, sizes) >= 30_020
    assert outcome.rows.ok.all()
    assert [tally.tokens > 0 for tally in outcome.record.decodes] == [True, False, False]


def parts(alone: list[float], usd: list[float]) -> list[Part]:
    """One part of each of three instances, on four GPUs each, at the test's prices."""
    spec = question(g5_12xlarge=1, g6_12xlarge=1, p4de_24xlarge=1)
    rows = shipped().instances
    priced = {
        name: rows[name].model_copy(update={"usd_per_hour": price * rows[name].gpus / 4})
        for name, price in zip(spec.plan.prefill, usd, strict=True)
    }
    spec = spec.model_copy(update={"catalogue": Catalogue(instances=priced)})
    rigs = [rig for rig in rig_choice(spec, Codec(name="rot-k4v4")).prefill if rig.pool.tp == 4]
    return [Part(rig, share, "", share) for rig, share in zip(rigs, alone, strict=True)]


def test_a_mix_by_hand() -> None:
    """The first kind serves half of the load for 10, and there is only one of it. The next kind serves a quarter for 6,
    and the last serves a tenth for 5. So 10 + 2 x 6 beats 4 x 6."""
    found = cheapest_mix([parts([2, 4, 10], [10, 6, 5])], {"g5.12xlarge": 1})
    assert found is not None
    assert [(part.rig.pool.instance, part.count) for part in found[0]] == [("g5.12xlarge", 1), ("g6.12xlarge", 2)]


def test_what_cannot_be_had_is_no_mix() -> None:
    assert (
        cheapest_mix([parts([2, 4, 10], [1, 1, 1])], dict.fromkeys(("g5.12xlarge", "g6.12xlarge", "p4de.24xlarge"), 0))
        is None
    )


@given(
    st.lists(st.integers(2, 7), min_size=3, max_size=3),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_no_mix_is_cheaper(alone: list[int], usd: list[int], can: list[int]) -> None:
    made = parts([float(share) for share in alone], [float(price) for price in usd])
    instances = [part.rig.pool.instance for part in made]
    most_of = [count * part.rig.instance.gpus // 4 for count, part in zip(can, made, strict=True)]
    prices = [
        sum(n * price for n, price in zip(counts, usd, strict=True))
        for counts in product(*(range(most + 1) for most in most_of))
        if sum(n / share for n, share in zip(counts, alone, strict=True)) >= 1 - 1e-9
    ]
    found = cheapest_mix([made], dict(zip(instances, can, strict=True)))
    if not prices:
        assert found is None
    else:
        assert found is not None
        assert sum(part.usd for part in found[0]) == pytest.approx(min(prices), rel=2e-3)


def test_kinds_are_mixed_only_where_one_does_not_suffice() -> None:
    spec = question(g5_12xlarge=2, g6_12xlarge=2, p4de_24xlarge=1)
    assert not any(one.is_mixed for one in candidates(spec, demand_of(spec, 0.2, LIMITS)))
    found = [one for one in candidates(spec, demand_of(spec, 9.0, LIMITS)) if one.is_mixed]
    assert found
    for one in found:
        assert one.fits(spec.plan.available)
        assert one.label == "rot-k4v4, mixed"
        shares = [sum(part.count / part.alone for part in side) for side in (one.prefill, one.decode)]
        assert min(shares) >= 1 - 1e-6


def test_a_plan_chooses_among_the_pools_of_the_specification() -> None:
    spec = mixed().model_copy(update={"plan": Choices(tp=(4,), pp=(1,))})
    choice = rig_choice(spec, Codec(name="rot-k4v4"))
    assert [rig.pool.instance for rig in choice.prefill] == ["g5.12xlarge", "g6.12xlarge"]
    assert [rig.pool.instance for rig in choice.decode] == ["p4de.24xlarge"]


@pytest.mark.slow
def test_a_mix_serves_more_and_says_who_does_what() -> None:
    spec = question(g5_12xlarge=2, g6_12xlarge=2, p4de_24xlarge=1)
    trials = most(spec, demand_of(spec, 1.0, LIMITS), 48.0, 0)
    rates = {trial.candidate.label: trial.rate for trial in trials}
    assert rates["rot-k4v4, mixed"] > 1.1 * rates["rot-k4v4"]
    assert trials[0].candidate.is_mixed
    assert trials[0].usd <= 48.0
    page = "\n".join(report(spec, demand_of(spec, trials[0].rate, LIMITS), trials, "hackkv plan", 48.0))
    assert "of the role's tokens" in page
    assert "## What stays idle" in page


@pytest.mark.slow
def test_a_rate_that_needs_a_mix_takes_the_fewest_replicas() -> None:
    spec = question(g5_12xlarge=2, g6_12xlarge=2, p4de_24xlarge=1)
    demand = demand_of(spec, 9.0, LIMITS)
    one = next(one for one in candidates(spec, demand) if one.is_mixed)
    trial = settle(spec, one, demand, 300, 0)
    assert trial is not None
    assert trial.keeps
    assert trial.candidate.fits(spec.plan.available)
    for index in range(len(trial.candidate.parts)):
        less = trial.candidate.changed(index, -1)
        assert less is None or not try_out(spec, less, demand, 300, 0).keeps


def test_why_a_machine_stays_idle() -> None:
    spec = question(g5_12xlarge=2, g6_12xlarge=2, p4de_24xlarge=1)
    demand = demand_of(spec, 0.2, LIMITS)
    one = next(one for one in candidates(spec, demand) if "g6.12xlarge" not in one.gpus)

    def why(spec: Spec, demand: ServiceTarget, budget: float | None = None) -> str:
        return {name: words for name, _, words in idle(spec, demand, one, budget)}["g6.12xlarge"]

    assert why(spec, demand) == "the rate needs no more"
    assert why(spec, demand, one.usd) == "the budget is spent"
    strict = why(spec, demand_of(spec, 0.2, parse("ttft_p90=1ms,tpot_p90=1ms")))
    assert strict.startswith("prefill: a prompt takes ")
    assert "; decode: a decode step of one sequence takes " in strict
    large = spec.model_copy(update={"model": "falcon-180b"})
    words = "weights and the longest request do not fit"
    assert why(large, demand) == f"prefill: {words}; decode: {words}"


def test_parts_change_one_by_one() -> None:
    spec = question(g5_12xlarge=2, g6_12xlarge=2, p4de_24xlarge=1)
    demand = demand_of(spec, 0.2, LIMITS)
    one = next(one for one in candidates_of(rig_choice(spec, Codec(name="rot-k4v4")), demand) if not one.is_mixed)
    assert one.changed(0, -one.prefill[0].count) is None
    other = next(
        part
        for rig in rig_choice(spec, Codec(name="rot-k4v4")).prefill
        if rig.pool.instance != one.prefill[0].rig.pool.instance and (part := prefill_part(rig, demand))
    )
    both = one.joined(other, prefill=True)
    assert both.is_mixed
    assert both.joined(other, prefill=True).prefill[1].count == 2
    back = both.changed(1, -1)
    assert back is not None
    assert [part.rig for part in back.parts] == [part.rig for part in one.parts]
    moved = both.moved(0, 1, (one.prefill[0].count, 3))
    assert moved is not None
    assert [part.count for part in moved.prefill] == [4]
