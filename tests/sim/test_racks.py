"""Racks behind an uplink: which flows share it, cases by hand, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sim.capacity import GBIT, crossing_of, line_of
from sim.network import Flow, Network, SharedLink, fair_rates
from sim.network_spec import LinkSharing, NetworkSpec, RackSpec
from sim.racks import Uplink, between, uplinks_of
from sim.spec import Load, ReplicaPool, Spec
from sim.workload import synthetic
from tests.sim.clusters import run, small
from tests.sim.test_cluster import check_books
from tests.sim.test_network import new_world


def uplinks(spec: Spec) -> dict[tuple[str, int], Uplink]:
    numbered = {
        role: [(number, pool) for pool in pools for number in range(pool.replicas)]
        for role, pools in spec.roles.items()
    }
    return uplinks_of(spec, numbered, SharedLink)


def racked(prefills: int, decodes: int, **rack: Any) -> Spec:
    return small(prefills, decodes, network=NetworkSpec(rack=RackSpec(**rack)))


def test_max_min_over_an_uplink_by_hand() -> None:
    """Senders a, b, c (10 each) share an uplink of 12; c's receiver takes 2, and d has lines of its own.

    c gets 2, so a and b get (12 - 2) / 2 = 5. d shares its receiver (12) with a: 12 - 5 = 7.
    """
    lines = {name: SharedLink(name, 10.0) for name in "abcd"}
    uplink, slow, wide, other = (
        SharedLink(*of) for of in (("up", 12.0), ("slow", 2.0), ("wide", 12.0), ("other", 9.0))
    )
    paths = {"a": (lines["a"], uplink, wide), "b": (lines["b"], uplink, other), "c": (lines["c"], uplink, slow)}
    flows = {name: Flow(path, 100.0, lambda: None) for name, path in {**paths, "d": (lines["d"], wide)}.items()}
    rates = fair_rates(flows.values())
    assert {name: rates[flow] for name, flow in flows.items()} == pytest.approx({"a": 5, "b": 5, "c": 2, "d": 7})


def test_time_over_an_uplink_by_hand() -> None:
    """10 and 30 bytes share an uplink of 4. Both get 2 until 5 s. Then 20 bytes are left at 4, which end at 10 s."""
    world, ends = new_world(), list[float]()
    network, uplink = Network(world, LinkSharing.FAIR), SharedLink("up", 4.0)
    for number, size in enumerate((10.0, 30.0)):
        line = SharedLink(f"line {number}", 8.0)
        network.start(Flow((line, uplink), 100.0, lambda: ends.append(world.now)), size)
    world.run()
    assert ends == pytest.approx([5.0, 10.0])
    assert uplink.carried == network.bytes == 40.0


def test_roles_fill_racks_one_after_another() -> None:
    found = uplinks(racked(4, 12, instances=2, uplink_gbit_s=100))  # a prefill replica takes an instance, decode an 8th
    ups = [found["prefill", number] for number in range(4)] + [found["decode", number] for number in range(12)]
    assert [len({id(one) for one in ups[:2]}), len({id(one) for one in ups[2:4]}), len({id(one) for one in ups})] == [
        1,
        1,
        3,
    ]
    assert ups[4] is ups[15]
    assert ups[0].up.rate == pytest.approx(0.85 * 100 * GBIT)
    assert between(ups[0], ups[1]) == ()
    assert between(ups[0], ups[4]) == (ups[0].up, ups[4].down)


def test_mixed_racks_have_both_roles() -> None:
    pool = ReplicaPool(instance="p4de.24xlarge", replicas=4, tp=8)
    rack = RackSpec(instances=2, uplink_gbit_s=100, mixed=True)
    found = uplinks(small(prefill=pool, decode=pool, network=NetworkSpec(rack=rack)))
    for number in range(4):
        assert found["prefill", number] is found["decode", number]
    assert len({id(one) for one in found.values()}) == 4


def test_oversubscription() -> None:
    spec = racked(4, 4, instances=4, oversubscription=3)
    line = line_of(spec, spec.prefill[0])
    assert uplinks(spec)["prefill", 0].up.rate == pytest.approx(4 * line / 3)
    assert crossing_of(spec, spec.prefill[0]) == pytest.approx(line / 3)


@pytest.mark.parametrize("rack", [{}, {"uplink_gbit_s": 10, "oversubscription": 2}])
def test_one_rate_is_wanted(rack: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="either uplink_gbit_s or oversubscription"):
        RackSpec(instances=2, **rack)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_every_replica_has_one_rack_and_none_is_too_full(prefills: int, decodes: int, size: int, mixed: bool) -> None:
    found = uplinks(racked(prefills, decodes, instances=size, uplink_gbit_s=1, mixed=mixed))
    assert len(found) == prefills + decodes
    members: dict[int, float] = {}
    for (role, _), uplink in found.items():
        members[id(uplink)] = members.get(id(uplink), 0.0) + (1.0 if role == "prefill" else 1 / 8)
    assert max(members.values()) < size + 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("sharing", list(LinkSharing))
def test_a_cluster_in_racks_loses_nothing(sharing: LinkSharing, mixed: bool) -> None:
    rack = RackSpec(instances=1, uplink_gbit_s=4, mixed=mixed)
    spec = small(
        4, 8, network=NetworkSpec(rack=rack, sharing=sharing), load=Load(shape="arxiv", rate=4.0, requests=200)
    )
    outcome = run(spec, synthetic(spec.load, 0))
    assert outcome.rows.ok.all()
    check_books(outcome)
    carried = {
        way: sum(link.carried for link in outcome.links if link.name.startswith("rack") and link.name.endswith(way))
        for way in ("up", "down")
    }
    assert carried["up"] == carried["down"] <= outcome.network.bytes * (1 + 1e-12)
    if not mixed:
        assert carried["up"] == pytest.approx(outcome.network.bytes)


def test_a_narrow_uplink_makes_transfers_longer_and_a_wide_one_changes_nothing() -> None:
    spec = small(load=Load(shape="arxiv", rate=2.0, requests=150))
    arrivals = synthetic(spec.load, 0)
    plain, wide, narrow = (
        run(spec.model_copy(update={"network": NetworkSpec(rack=rack)}), arrivals)
        for rack in (None, RackSpec(instances=2, uplink_gbit_s=1e5), RackSpec(instances=2, uplink_gbit_s=1))
    )
    assert wide.log.hexdigest == plain.log.hexdigest
    assert narrow.rows["transfer_s"].mean() > 2 * plain.rows["transfer_s"].mean()


def test_routers_have_racks_of_their_own() -> None:
    rack = RackSpec(instances=4, oversubscription=2)
    spec = small(4, 4, network=NetworkSpec(rack=rack), policy={"shards": 2})
    outcome = run(spec, synthetic(spec.load, 0))
    assert (
        sum(link.name.startswith("rack") for link in outcome.links) == 2 * 2
    )  # two routers, each with a rack, both ways
