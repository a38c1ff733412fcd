"""The budget of host memory is exact at every moment, and claims push out the right tenants."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_node.drain_rate import LONGEST_S, SHORTEST_S, WINDOW_S, DrainRate
from prefill_node.host_pool import Claim, HostPool, Tenant

CAPACITY = 100
ORDER = [Tenant.PREFIX, Tenant.KEPT]
"""Tenants in the order in which they are pushed out."""


class Tenants(RuleBasedStateMachine):
    """Claims of every kind come, change and go. The model is a list of living claims, the oldest of each kind first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.pool = HostPool(CAPACITY, self.on_left)
        self.living: list[Claim] = []
        self.gone: list[Claim] = []
        self.lost: list[int] = []
        self.count = 0

    def on_left(self, num_bytes: int) -> None:
        self.left += num_bytes

    def held(self, *kinds: Tenant) -> int:
        return sum(claim.num_bytes for claim in self.living if claim.tenant in kinds)

    @rule(tenant=st.sampled_from([Tenant.WAITING, Tenant.PREFIX]), num_bytes=st.integers(0, CAPACITY + 10))
    def claim(self, tenant: Tenant, num_bytes: int) -> None:
        """A claim pushes out just enough claims of lower rank: prefix pages first, and the oldest first."""
        below = ORDER if tenant is Tenant.WAITING else [Tenant.PREFIX]
        due, free = [], CAPACITY - self.held(*Tenant)
        for claim in [claim for kind in below for claim in self.living if claim.tenant is kind]:
            if free < num_bytes:
                due.append(claim)
                free += claim.num_bytes
        self.lost.clear()
        self.count += 1
        name = self.count
        made = self.pool.claim(tenant, num_bytes, lambda: self.lost.append(name))
        if free < num_bytes:
            assert made is None
            assert self.lost == []
            return
        assert made is not None
        assert len(self.lost) == len(due)
        self.living = [claim for claim in self.living if claim not in due] + [made]
        self.gone += due

    @precondition(lambda self: self.living)
    @rule(data=st.data(), tenant=st.sampled_from([Tenant.WAITING, Tenant.KEPT]))
    def turn(self, data: st.DataObject, tenant: Tenant) -> None:
        """A claim changes its tenant, and is then the youngest of its new kind."""
        claim = data.draw(st.sampled_from(self.living))
        if claim.tenant is Tenant.PREFIX:
            tenant = Tenant.PREFIX
        due = self.left + claim.num_bytes * (claim.tenant is Tenant.WAITING is not tenant)
        self.pool.change_tenant(claim, tenant)
        assert self.left == due
        assert claim.tenant is tenant
        self.living.remove(claim)
        self.living.append(claim)

    @precondition(lambda self: self.living or self.gone)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        """A claim keeps its age and gives back bytes, never more than it has."""
        claim = data.draw(st.sampled_from(self.living + self.gone))
        num_bytes = data.draw(st.integers(0, claim.num_bytes))
        due = self.left + num_bytes * (claim in self.living and claim.tenant is Tenant.WAITING)
        kept = claim.num_bytes - num_bytes * (claim in self.living)
        self.pool.shrink(claim, num_bytes)
        assert (self.left, claim.num_bytes) == (due, kept)
        with pytest.raises(ValueError, match="cannot give back"):
            self.pool.shrink(claim, kept + 1)

    @precondition(lambda self: self.living or self.gone)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A claim is released, possibly for the second time or after it was lost."""
        claim = data.draw(st.sampled_from(self.living + self.gone))
        due = self.left + claim.num_bytes * (claim in self.living and claim.tenant is Tenant.WAITING)
        self.pool.release(claim)
        assert self.left == due
        if claim in self.living:
            self.living.remove(claim)
            self.gone.append(claim)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), tenant=st.sampled_from(Tenant))
    def turn_what_is_gone(self, data: st.DataObject, tenant: Tenant) -> None:
        """A lost claim stays lost."""
        self.pool.change_tenant(data.draw(st.sampled_from(self.gone)), tenant)

    @invariant()
    def bytes_add_up(self) -> None:
        """Bytes add up, by kind and in total, and never exceed the budget."""
        for tenant in Tenant:
            assert self.pool.bytes_of(tenant) == self.held(tenant)
        assert self.pool.free_bytes == CAPACITY - self.held(*Tenant) >= 0


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=50, stateful_step_count=30)


def test_the_drain_rate_is_that_of_the_last_seconds() -> None:
    now = 100.0
    rate = DrainRate(lambda: now)
    now += 10
    assert rate.seconds(50) == LONGEST_S, "nothing left in ten seconds"
    rate.left(100)
    assert rate.seconds(50) == 5.0
    assert rate.seconds(1) == SHORTEST_S
    assert rate.seconds(10_000) == LONGEST_S
    now += WINDOW_S / 2
    rate.left(200)
    assert rate.seconds(60) == 60 * 25 / 300
    now += WINDOW_S / 2 + 1
    assert rate.seconds(60) == 60 * WINDOW_S / 200, "the first hundred bytes are too long ago"
