"""Host memory for compressed KV: one budget of bytes, shared by three kinds of tenants. Numbers only.

    waiting   KV that no decode node has. It claims the worst case when its prompt starts, and gives back the bytes
              that coding saves. Never pushed out.
    kept      KV that a decode node has, kept in case that node dies. The oldest is pushed out first.
    prefix    Sealed pages of earlier prompts. The least recently used is pushed out first.

Bytes are claimed before they are filled, so the budget is never exceeded. A waiting claim pushes out prefix pages, then
kept KV. A prefix page pushes out other prefix pages only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Tenant(StrEnum):
    """A purpose of host memory."""

    WAITING = "waiting"
    KEPT = "kept"
    PREFIX = "prefix"


_YIELDING: Final = {
    Tenant.WAITING: (Tenant.PREFIX, Tenant.KEPT),
    Tenant.KEPT: (),
    Tenant.PREFIX: (Tenant.PREFIX,),
}
"""Tenant that claims -> the tenants that it pushes out, in that order. Kept KV has its claim from when it waited."""


@dataclass(eq=False, slots=True)
class Claim:
    """A tenant's bytes of the pool. `pushed_out` is called when another claim pushes them out."""

    num_bytes: int
    tenant: Tenant
    pushed_out: Callable[[], None]


class HostPool:
    """Hands out bytes of a fixed budget. "No room" is a return value."""

    def __init__(self, capacity_bytes: int, on_left: Callable[[int], None]) -> None:
        """`on_left` is called with the number of bytes that cease to wait: another prompt may find room now."""
        self.capacity_bytes = capacity_bytes
        self._on_left = on_left
        self._claims: dict[Tenant, dict[Claim, None]] = {tenant: {} for tenant in Tenant}
        self._bytes = dict.fromkeys(Tenant, 0)

    def bytes_of(self, tenant: Tenant) -> int:
        """Bytes that one kind of tenant has claimed."""
        return self._bytes[tenant]

    @property
    def free_bytes(self) -> int:
        """Bytes that no tenant has claimed."""
        return self.capacity_bytes - sum(self._bytes.values())

    def claim(self, tenant: Tenant, num_bytes: int, pushed_out: Callable[[], None]) -> Claim | None:
        """Claim bytes, and push out as few yielding claims as necessary.

        Returns None and changes nothing if pushing out all of them is not enough.
        """
        if num_bytes > self.free_bytes:
            yielding = _YIELDING[tenant]
            if num_bytes > self.free_bytes + sum(self._bytes[other] for other in yielding):
                return None
            for other in yielding:
                while self._claims[other] and num_bytes > self.free_bytes:
                    oldest = next(iter(self._claims[other]))
                    self.release(oldest)
                    oldest.pushed_out()
        claim = Claim(num_bytes, tenant, pushed_out)
        self._add(claim)
        return claim

    def change_tenant(self, claim: Claim, tenant: Tenant) -> None:
        """Make a claim the youngest of `tenant`, which may be its present kind. A lost claim is ignored."""
        if not self._remove(claim):
            return
        waited, claim.tenant = claim.tenant is Tenant.WAITING, tenant
        self._add(claim)
        if waited and tenant is not Tenant.WAITING:
            self._on_left(claim.num_bytes)

    def shrink(self, claim: Claim, num_bytes: int) -> None:
        """Give back `num_bytes` of a claim, which keeps its age. A lost claim is ignored.

        Raises `ValueError` when the claim is smaller.
        """
        if num_bytes > claim.num_bytes:
            raise ValueError(f"a claim of {claim.num_bytes} bytes cannot give back {num_bytes}")
        if not num_bytes or claim not in self._claims[claim.tenant]:
            return
        claim.num_bytes -= num_bytes
        self._bytes[claim.tenant] -= num_bytes
        if claim.tenant is Tenant.WAITING:
            self._on_left(num_bytes)

    def release(self, claim: Claim) -> None:
        """Give a claim's bytes back. A lost claim is ignored."""
        if self._remove(claim) and claim.tenant is Tenant.WAITING:
            self._on_left(claim.num_bytes)

    def _add(self, claim: Claim) -> None:
        self._claims[claim.tenant][claim] = None
        self._bytes[claim.tenant] += claim.num_bytes

    def _remove(self, claim: Claim) -> bool:
        if claim not in self._claims[claim.tenant]:
            return False
        del self._claims[claim.tenant][claim]
        self._bytes[claim.tenant] -= claim.num_bytes
        return True
