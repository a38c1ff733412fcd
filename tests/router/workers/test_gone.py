"""A worker's list of nodes that are gone, when its leader has a different list."""

from __future__ import annotations

import socket
from typing import Any

from hackkv.types import Role
from router.workers.link import WorkerLink
from router.workers.process import LeadersJournal
from tests.router.conftest import INSIDE, Inside
from tests.router.scripted import info
from tests.router.workers.test_link import End

pytestmark = INSIDE


class Leader(End):
    """A leader that counts these nodes as gone."""

    gone: tuple[str, ...] = ("d0", "earlier")

    async def _answer(self, subject: str, value: Any) -> Any:
        return {"asked": [subject, value], "gone": [{"id": node_id, "gone_s": 4.0} for node_id in self.gone]}


async def test_no_node_is_both_here_and_gone_and_none_is_neither(api: Inside) -> None:
    cluster = api.cluster
    one, other = socket.socketpair()
    leader, worker = Leader(await WorkerLink.over(one)), End(await WorkerLink.over(other))
    journal = LeadersJournal(cluster.fleet, worker.link, "")
    try:
        told = await journal.cluster(7)
        assert told["asked"] == ["cluster", 7]
        assert [node["id"] for node in told["gone"]] == ["earlier"], "d0 is here"
        cluster.now += 2
        for node_id in ("p0", "p1", "d1"):
            await cluster.fleet.nodes.register(info(Role.PREFILL if node_id[0] == "p" else Role.DECODE, node_id))
        cluster.now += 2
        cluster.fleet.nodes.expire()
        for leader.gone in (("d0", "earlier"), ("earlier",)):  # the leader's lease of d0 ends earlier or later
            assert [node["id"] for node in (await journal.cluster(7))["gone"]] == ["d0", "earlier"]
    finally:
        for end in (leader, worker):
            end.link.close()
            await end.running
