"""The nodes of one role: those that are here, and the last reports of those that left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

from hackkv.errors import Unavailable
from hackkv.nodes import NodeInfo
from hackkv.types import Role
from router.fleet.members import Member, NodeT

log = logging.getLogger(__name__)


class Roster(Generic[NodeT]):
    """A node is here while it renews its lease of `ttl_s`. A node that left may only be restarting: its last report
    counts for `remember_s`, and for as long as no node of its role is here."""

    def __init__(
        self, role: Role, dial: Callable[[str], NodeT], ttl_s: float, remember_s: float, now: Callable[[], float]
    ) -> None:
        self.role, self.dial = role, dial
        self._ttl_s, self._remember_s, self._now = ttl_s, remember_s, now
        self._here: dict[str, Member[NodeT]] = {}
        self._away: dict[str, tuple[NodeInfo, float]] = {}

    @property
    def members(self) -> tuple[Member[NodeT], ...]:
        """Every node with a live lease."""
        return tuple(self._here.values())

    @property
    def missing(self) -> bool:
        """Whether no live node fills the role, not counting nodes that are about to stop."""
        return all(member.draining for member in self._here.values())

    def member(self, node_id: str) -> Member[NodeT]:
        """The live node of that name."""
        return self._here[node_id]

    def admit(self, info: NodeInfo) -> None:
        """A node joins, renews its lease, or comes back as another process."""
        member = self._here.get(info.node_id)
        if member is not None and (member.info.incarnation, member.info.address) == (info.incarnation, info.address):
            member.renew(info, self._now())
            return
        if member is not None:
            self._remove(info.node_id, "was restarted")
        self._away.pop(info.node_id, None)
        self._here[info.node_id] = Member(info, self.dial(info.address), self._now(), self._ttl_s)
        log.info("%s node %s joined at %s", info.role, info.node_id, info.address)

    def expire(self) -> None:
        """Take out every node whose lease has run out; requests on it fail with `NodeLost` at once."""
        now = self._now()
        for node_id in [node_id for node_id, member in self._here.items() if member.expires_at <= now]:
            self._remove(node_id, "lost its lease")

    def extend(self, seconds: float) -> None:
        """Let every lease last longer."""
        for member in self._here.values():
            member.expires_at += seconds

    def known(self) -> list[NodeInfo]:
        """Last reports of nodes that are here or may come back; if none is here, of all nodes that ever were."""
        now, here = self._now(), [member.info for member in self._here.values()]
        return here + [info for info, since in self._away.values() if not here or now - since < self._remember_s]

    def require(self) -> None:
        """Raises `Unavailable` if nobody has filled the role since the router started."""
        if not self._here and not self._away:
            raise unavailable(self.role)

    def _remove(self, node_id: str, why: str) -> None:
        member = self._here.pop(node_id)
        self._away[node_id] = member.info, self._now()
        log.log(logging.INFO if member.draining else logging.WARNING, "%s node %s %s", self.role, node_id, why)
        member.leave(why)


def unavailable(*roles: Role) -> Unavailable:
    """The error that names the roles without a node."""
    return Unavailable(f"no {' and no '.join(roles)} node is alive")
