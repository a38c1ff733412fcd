"""The members of the fleet.

A node is in the fleet while it renews its lease. Joining, renewing and coming back after a restart are one call,
`register`; nodes listed in the configuration are asked to `describe()` themselves and take the same path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from hackkv.errors import HackkvError, HandshakeRefused
from hackkv.nodes import CONTROL_VERSION, Lease, NodeInfo
from hackkv.types import Fingerprint, Role
from router.fleet.members import Member
from router.fleet.roster import Roster
from router.fleet.wires import check_wires
from transport.base import DecodeNode, PrefillNode

log = logging.getLogger(__name__)

AnyMember = Member[PrefillNode] | Member[DecodeNode]


class Membership:
    """All nodes that hold a live lease. Implements `transport.base.Registry`."""

    def __init__(
        self,
        prefill: Roster[PrefillNode],
        decode: Roster[DecodeNode],
        ttl_s: float,
        changed: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        """`changed` is called when there may be a node or room that was not there before."""
        self._prefill, self._decode = prefill, decode
        self._ttl_s, self._changed, self._now = ttl_s, changed, now
        self.codec = "unknown"
        """Name of the fleet's codec, as its fingerprint has it; a label of metrics."""
        self.followers: list[Callable[[NodeInfo], None]] = []
        """Called with every report that is accepted."""

    def members(self, role: Role | None = None) -> tuple[AnyMember, ...]:
        """Every live node, or those of one role."""
        prefill = () if role is Role.DECODE else self._prefill.members
        decode = () if role is Role.PREFILL else self._decode.members
        return (*prefill, *decode)

    @property
    def missing(self) -> tuple[Role, ...]:
        """Roles without a live node, not counting nodes that are about to stop."""
        return tuple(roster.role for roster in (self._prefill, self._decode) if roster.missing)

    async def register(self, info: NodeInfo) -> Lease:
        """Join, renew or return. Raises `HandshakeRefused` naming a field that differs from the fleet's."""
        self._check(info)
        if info.role is Role.PREFILL:
            self._prefill.admit(info)
        else:
            self._decode.admit(info)
        self.codec = dict(info.fingerprint.fields).get("codec", self.codec)
        self._changed()
        for follower in self.followers:
            follower(info)
        return Lease(self._ttl_s)

    def expire(self) -> None:
        """Take out every node whose lease has run out; requests on it fail with `NodeLost` at once."""
        self._prefill.expire()
        self._decode.expire()
        self._changed()  # a suspension may have run out

    async def run(self, static: tuple[tuple[Role, str], ...] = ()) -> None:
        """Expire leases and poll the `static` nodes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_forever())
            for role, address in static:
                tasks.create_task(self._poll_forever(role, address))

    async def _expire_forever(self) -> None:
        period = self._ttl_s / 4
        while True:
            due = self._now() + period
            await asyncio.sleep(period)
            late = self._now() - due
            if late > period:  # the router itself was held up, and could hear no node
                log.warning("the router was held up for %.1f s; leases are extended by as much", late)
                self._prefill.extend(late)
                self._decode.extend(late)
            self.expire()

    async def _poll_forever(self, role: Role, address: str) -> None:
        dial: Callable[[str], PrefillNode | DecodeNode]
        dial = self._prefill.dial if role is Role.PREFILL else self._decode.dial
        node, last_error = dial(address), ""
        while True:
            try:
                async with asyncio.timeout(self._ttl_s):
                    await self.register(replace((await node.describe()).reached_at(address), role=role))
                last_error = ""
            except (HackkvError, TimeoutError) as error:
                reason = str(error) or "no answer"
                if reason != last_error:  # once per change, not three times a lease
                    log.warning("%s node at %s: %s", role, address, reason)
                last_error = reason
            await asyncio.sleep(self._ttl_s / 3)

    def _check(self, info: NodeInfo) -> None:
        if info.control_version != CONTROL_VERSION:
            raise HandshakeRefused(
                f"node {info.node_id} is of another version of hackkv: control_version {info.control_version}, "
                f"the router's is {CONTROL_VERSION}"
            )
        if info.max_context <= 0 or (info.role is Role.DECODE and (info.page_tokens <= 0 or info.total_pages <= 0)):
            raise HandshakeRefused(
                f"node {info.node_id}: max_context {info.max_context}, page_tokens {info.page_tokens}, "
                f"total_pages {info.total_pages} must be positive"
            )
        fleet = self._fingerprint(without=info)
        if fleet is not None and (difference := fleet.mismatch(info.fingerprint, "in the fleet", "at the node")):
            raise HandshakeRefused(f"node {info.node_id} does not fit the fleet: {difference}")
        check_wires(info, (member.info for member in self.members()))

    def _fingerprint(self, without: NodeInfo) -> Fingerprint | None:
        for member in self.members():
            if (member.info.role, member.node_id) != (without.role, without.node_id):
                return member.info.fingerprint
        return None
